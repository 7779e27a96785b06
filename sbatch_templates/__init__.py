"""Templates of batch scripts; ``plexrl_slurm.slurm`` fills them in. Those of holds are planned."""

if __name__ != "plexrl_slurm.sbatch_templates":
    raise ImportError("import plexrl_slurm.sbatch_templates, not sbatch_templates")
