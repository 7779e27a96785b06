"""Templates of what Slurm, its nodes and systemd run; ``plexrl_slurm.slurm`` fills them in."""

if __name__ != "plexrl_slurm.sbatch_templates":
    raise ImportError("import plexrl_slurm.sbatch_templates, not sbatch_templates")
