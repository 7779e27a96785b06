"""Both ends of the daemon-agent link. Bytes and addresses; what they mean is the caller's."""

import asyncio
import socket
from pathlib import Path
from typing import Final, Self

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from plexrl_slurm.core.errors import Denied
from plexrl_slurm.transport import messages
from plexrl_slurm.transport.keys import agent_keys, server_keys

#: A link looks for messages so often even if nothing wakes it.
LOOK_S: Final = 0.5


class Inbox:
    """Receives from a socket, one message after the other.

    After a peer was killed, a socket that only receives may not be woken for the messages of the
    others (its file descriptor signals changes, not states), so it is also looked at by the clock.
    The wait itself is never cancelled: that could lose a message.
    """

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._next: asyncio.Future[list[bytes]] | None = None

    async def receive(self) -> list[bytes]:
        """The next message's parts."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._socket.recv_multipart())
        while not self._next.done():
            await asyncio.wait({self._next}, timeout=LOOK_S)
            if not self._next.done():
                self._socket.get(zmq.EVENTS)  # which has what is there handled
        parts, self._next = self._next.result(), None
        return parts

    def close(self) -> None:
        """Nobody receives any more."""
        if self._next is not None:
            self._next.cancel()


class AgentServer:
    """The daemon's end: many agents dial in, only those who hold the agent key get through."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._inbox = Inbox(self._socket)
        self._auth = AsyncioAuthenticator(self._context)

    def start(self, host: str) -> str:
        """Listen at the port where an earlier daemon listened, or at any free one; returns the
        endpoint. Raises ``Denied`` where that is not possible."""
        keys, agents = server_keys(self._state_dir), agent_keys(self._state_dir)
        self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=_Only(agents.public))
        self._socket.curve_secretkey = keys.secret
        self._socket.curve_publickey = keys.public
        self._socket.curve_server = True
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        # A restarted agent takes over its old identity at once.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        remembered = self._state_dir / "agents.endpoint"
        before = remembered.read_text().strip() if remembered.exists() else ""
        port = before.rpartition(":")[2] or "*"
        try:
            self._socket.bind(f"tcp://{socket.gethostbyname(host)}:{port}")
        except (zmq.ZMQError, OSError) as error:
            raise Denied(
                f"the daemon cannot listen for agents at {host}, port {port} ({error}): correct "
                f"hold.agent_address, or end what listens there"
            ) from error
        bound = str(self._socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        endpoint = f"tcp://{host}:{bound.rpartition(':')[2]}"
        if endpoint != before:
            remembered.write_text(endpoint + "\n")
        return endpoint

    async def receive(self) -> tuple[bytes, messages.Report]:
        """``(agent's address, report)``."""
        address, data = await self._inbox.receive()
        return address, messages.decode_report(data)

    async def send(self, address: bytes, command: messages.Command) -> None:
        """Queue a command; an agent that is gone never gets it, and says hello when it is back."""
        await self._socket.send_multipart([address, messages.encode(command)])

    def post(self, address: bytes, command: messages.Command) -> None:
        """:meth:`send` for callers that cannot wait."""
        self._socket.send_multipart([address, messages.encode(command)])

    def close(self) -> None:
        """Stop listening."""
        self._auth.stop()
        self._inbox.close()
        self._socket.close()
        self._context.term()


class _Only:
    """Lets exactly one client key in."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by the authenticator for every connection."""
        return key == self._public


class AgentLink:
    """The agent's end: one daemon, found again after its restart without help."""

    def __init__(self, state_dir: Path, *, agent: str, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._inbox = Inbox(self._socket)
        keys = agent_keys(state_dir)
        self._socket.curve_secretkey = keys.secret
        self._socket.curve_publickey = keys.public
        self._socket.curve_serverkey = server_keys(state_dir).public
        self._socket.setsockopt(zmq.IDENTITY, agent.encode())
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.connect(endpoint)

    async def receive(self) -> messages.Command:
        """The daemon's next command."""
        (data,) = await self._inbox.receive()
        return messages.decode_command(data)

    async def send(self, report: messages.Report) -> None:
        """Queue a report."""
        await self._socket.send(messages.encode(report))

    def close(self) -> None:
        """Hang up."""
        self._inbox.close()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
