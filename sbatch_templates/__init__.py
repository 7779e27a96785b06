"""Templates of batch scripts, read as ``plexrl_slurm.sbatch_templates``; those of holds are planned."""

if __name__ != "plexrl_slurm.sbatch_templates":
    raise ImportError("import plexrl_slurm.sbatch_templates, not sbatch_templates")
