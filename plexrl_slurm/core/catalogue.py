"""Models that a partition offers, as plain values. Reading them from disk is ``settings``' work."""

from dataclasses import dataclass

from plexrl_slurm.core.sizes import WIDTHS, image_size
from plexrl_slurm.core.zero import ZeroLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One catalogue entry: a Hugging Face model folder, and what it weighs."""

    #: What users write as ``base_model``.
    name: str
    #: Folder with ``config.json``, ``*.safetensors`` and a tokenizer.
    path: str
    #: ``float32`` or ``bfloat16``: dtype of the device weights.
    dtype: str
    #: Longest prompt plus completion, in tokens.
    max_context_length: int
    #: Rows of the embedding; a token id must be below it.
    vocab_size: int
    #: Number of parameters, tied ones once.
    parameters: int
    #: Same for two entries that can share a skeleton or an engine slot: hash of the
    #: ``config.json`` fields that shape tensors, and the dtype.
    architecture: str
    #: Of a training image on the partition's WPGs, all ranks together, where it is largest; 0: as
    #: on one GPU.
    image_bytes: int = 0

    @property
    def weights_bytes(self) -> int:
        """Bytes of the sampling weights."""
        return self.parameters * WIDTHS[self.dtype]

    @property
    def train_bytes(self) -> int:
        """Bytes of a full training image: weights, fp32 master, Adam m and v, open gradients."""
        one = image_size(self.parameters, dtype=self.dtype, layout=ZeroLayout(), ranks=1)
        return self.image_bytes or one.total
