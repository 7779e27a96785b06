"""Names of things. A job id can never be passed where a call id is wanted."""

from typing import NewType

#: PlexRL's own number of a job: the queue row.
JobId = NewType("JobId", int)
#: Slurm's number of the controller's job (with the local adapter: that adapter's number).
SlurmId = NewType("SlurmId", str)
#: A worker process group, for example ``train-0``.
WpgId = NewType("WpgId", str)
#: What a WPG can hold: a training deployment (its Tinker ``model_id``) or a snapshot.
DeploymentId = NewType("DeploymentId", str)
#: One accepted call; also the Tinker ``request_id``.
CallId = NewType("CallId", str)
#: What set a chain of events off; carried into logs and ledger rows.
CauseId = NewType("CauseId", str)
