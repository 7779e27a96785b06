"""Speak to the daemon: its routes as methods, its refusals as errors."""

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from plexrl_slurm.cli.contact import Answer, Contact
from plexrl_slurm.core.errors import NotAdmitted, NotFound, PlexError
from plexrl_slurm.whereabouts import Site

#: Answers come at once, except while the daemon's database is busy.
TIMEOUT_S = 30.0
PREFIX = "/plexrl/v1"


class Refused(PlexError):
    """The daemon refused the request. Carries the exit code of the daemon's own error."""

    def __init__(self, sentence: str, code: int, status: int) -> None:
        super().__init__(sentence, code, status)
        self.sentence, self.status = sentence, status
        self.__dict__["exit_code"] = code

    def explain(self) -> str:
        return self.sentence


class Client:
    """The routes of ``/plexrl/v1``. The daemon knows the caller's uid by the socket or by MUNGE."""

    def __init__(self, site: Site, *, timeout_s: float = TIMEOUT_S) -> None:
        self._site = site
        self._contact = Contact(site, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing stays open between two requests."""

    def health(self) -> dict[str, Any]:
        """``GET healthz``."""
        return self._object("GET", f"{PREFIX}/healthz")

    def submit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Queue a job: ``{"job_id", "token", "env"}``."""
        return self._object("POST", f"{PREFIX}/jobs", body)

    def bind(self, job_id: int, slurm_id: str) -> None:
        """Tie the queued job to its Slurm job; only then may it start."""
        self._ask("POST", f"{PREFIX}/jobs/{job_id}/bind", {"slurm_id": slurm_id})

    def credentials(self, slurm_id: str) -> dict[str, Any] | None:
        """As :meth:`submit` answered for this Slurm job of the caller's; ``None``: no such job.

        Raises ``NotAdmitted`` while it waits.
        """
        try:
            return self._object("POST", f"{PREFIX}/slurm-jobs/{slurm_id}/credentials")
        except Refused as error:
            if error.status == 404:
                return None
            if error.status == 409:
                known = f"job {slurm_id} is not admitted yet: "
                raise NotAdmitted(slurm_id, error.sentence.removeprefix(known)) from error
            raise

    def cancel(self, job_id: int, *, reason: str, keep_slurm_job: bool = False) -> None:
        """End a job, and its Slurm job unless that is to go on without the service."""
        body = {"reason": reason, **({"keep_slurm_job": True} if keep_slurm_job else {})}
        self._ask("POST", f"{PREFIX}/jobs/{job_id}/cancel", body)

    def jobs(self, *, user: str | None = None, ended: bool = False) -> list[dict[str, Any]]:
        """Jobs that the caller may see."""
        params: dict[str, str] = {"ended": "true"} if ended else {}
        if user is not None:
            params["user"] = user
        return _items(self._ask("GET", f"{PREFIX}/jobs", params=params), "jobs")

    def job(self, slurm_id: str) -> dict[str, Any]:
        """The job that the user knows by Slurm's number; an ended one too."""
        found = [job for job in self.jobs(ended=True) if str(job["slurm_id"]) == slurm_id]
        if not found:
            raise NotFound("job", slurm_id)
        return max(found, key=lambda job: int(job["job_id"]))

    def explain(self, job_id: int) -> dict[str, Any]:
        """Why a job waits, and its story."""
        return self._object("GET", f"{PREFIX}/jobs/{job_id}/explain")

    def priorities(self) -> dict[str, Any]:
        """Waiting jobs in their order, with the parts of their priorities."""
        return self._object("GET", f"{PREFIX}/priorities")

    def starts(self) -> list[dict[str, Any]]:
        """When waiting jobs are expected to start."""
        return _items(self._ask("GET", f"{PREFIX}/starts"), "jobs")

    def nodes(self) -> dict[str, Any]:
        """WPGs, hold and catalogue."""
        return self._object("GET", f"{PREFIX}/nodes")

    def state(self) -> dict[str, Any]:
        """Every image of the partition, and bytes of every tier."""
        return self._object("GET", f"{PREFIX}/state")

    def job_state(self, job_id: int) -> dict[str, Any]:
        """Images and checkpoints of a job."""
        return self._object("GET", f"{PREFIX}/jobs/{job_id}/state")

    def verify_state(self, job_id: int, uri: str) -> dict[str, Any]:
        """What each file of a checkpoint is like; takes as long as reading them."""
        target = f"{PREFIX}/jobs/{job_id}/state/verify?{urlencode({'uri': uri})}"
        return self._object("GET", target)

    def state_files(self, job_id: int, uri: str) -> dict[str, Any]:
        """The files that make sampler weights a model folder."""
        target = f"{PREFIX}/jobs/{job_id}/state/files?{urlencode({'uri': uri})}"
        return self._object("GET", target)

    def state_piece(
        self, job_id: int, uri: str, file: Mapping[str, Any], *, offset: int, length: int
    ) -> bytes:
        """Bytes of one of these files."""
        asked = {"uri": uri, "name": file["name"], "version": file["version"]}
        query = urlencode({**asked, "offset": offset, "length": length})
        answer = self._contact.ask("GET", f"{PREFIX}/jobs/{job_id}/state/piece?{query}", b"")
        if answer.status != 200:
            self._read(answer)  # raises what it says
        return answer.body

    def evict_state(self, job_id: int, *, deployment: str, to: str) -> dict[str, Any]:
        """Images leave host memory."""
        body = {"deployment": deployment, "to": to}
        return self._object("POST", f"{PREFIX}/jobs/{job_id}/state/evict", body)

    def begin_import(self, job_id: int, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Weights are to come; the number of the import, and how much to send at once."""
        return self._object("POST", f"{PREFIX}/jobs/{job_id}/state/import", asked)

    def import_piece(
        self, job_id: int, import_id: str, *, name: str, offset: int, data: bytes
    ) -> None:
        """Bytes of one of its files."""
        query = urlencode({"name": name, "offset": offset})
        target = f"{PREFIX}/jobs/{job_id}/state/import/{import_id}?{query}"
        self._read(self._contact.ask("PUT", target, data))

    def finish_import(self, job_id: int, import_id: str, sums: Mapping[str, str]) -> dict[str, Any]:
        """The checkpoint that it is now."""
        target = f"{PREFIX}/jobs/{job_id}/state/import/{import_id}/finish"
        return self._object("POST", target, {"sha256": dict(sums)})

    def timeline(self, *, since_us: int, until_us: int) -> list[dict[str, Any]]:
        """Stretches of every WPG."""
        params = {"since_us": str(since_us), "until_us": str(until_us)}
        return _items(self._ask("GET", f"{PREFIX}/timeline", params=params), "stretches")

    def image_moves(self, *, since_us: int, until_us: int) -> list[dict[str, Any]]:
        """Into which tiers images went."""
        params = {"since_us": str(since_us), "until_us": str(until_us)}
        return _items(self._ask("GET", f"{PREFIX}/timeline/images", params=params), "images")

    def drain(self, *, on: bool) -> dict[str, Any]:
        """Stop or resume admitting jobs."""
        return self._object("POST", f"{PREFIX}/drain", {"on": on})

    def release(self) -> dict[str, Any]:
        """Give the held GPUs back."""
        return self._object("POST", f"{PREFIX}/release", {})

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
    ) -> Any:
        # What is no UTF-8 (a job's name, from the command line) arrives as question marks.
        text = "" if body is None else json.dumps(body, ensure_ascii=False)
        data = text.encode(errors="replace")
        target = f"{path}?{urlencode(params)}" if params else path
        return self._read(self._contact.ask(method, target, data))

    def _object(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        data = self._ask(method, path, body)
        return data if isinstance(data, dict) else {}

    def _read(self, answer: Answer) -> Any:
        try:
            data = json.loads(answer.body)
        except ValueError:
            data = None
        if 200 <= answer.status < 300 and data is not None:
            return data
        if isinstance(data, dict) and isinstance(data.get("error"), str):
            raise Refused(data["error"], int(data.get("exit_code", 1)), answer.status)
        raise Refused(
            f"{answer.where} answered {answer.status} without an explanation: see "
            f"{self._site.state_dir / 'partitiond.log'}, or ask your admin",
            70,
            answer.status,
        )


def _items(data: Any, key: str) -> list[dict[str, Any]]:
    """The list, whether or not it stands in an object."""
    return list(data[key] if isinstance(data, dict) else data)
