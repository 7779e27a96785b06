"""A toy cluster that gives, refuses, ends, requeues and breaks holds, driven by ``decide``."""

from dataclasses import dataclass, field, replace
from random import Random

from plexrl_slurm.core.holding import (
    Demand,
    Drain,
    Extend,
    HoldAction,
    HoldPhase,
    HoldRules,
    HoldView,
    Release,
    Submit,
    Undrain,
    decide,
    next_look_us,
)

SECOND = 1_000_000
TICK_US = 4 * SECOND
#: An empty hold takes so many deployments.
SLOTS = 2
RULES = HoldRules(
    min=1,
    max=3,
    time_limit_us=600 * SECOND,
    renew_before_us=150 * SECOND,
    scale_up_after_us=20 * SECOND,
    idle_release_us=60 * SECOND,
)


@dataclass
class Trouble:
    """What goes wrong, as chances for each tick."""

    #: Holds that fit on the cluster together.
    room: int = 4
    refuses_extensions: bool = False
    rejects: float = 0.0
    requeues: float = 0.0
    losses: float = 0.0
    jobs: float = 0.05


@dataclass
class Hold:
    view: HoldView
    starts_us: int
    ready_us: int = 0
    drained_us: int = 0
    gone_us: int = 0
    living: set[int] = field(default_factory=set)


class ToySlurm:
    """``run`` lets time pass and checks what must always hold."""

    def __init__(self, seed: int, rules: HoldRules, trouble: Trouble) -> None:
        self.rng, self.rules, self.trouble = Random(seed), rules, trouble
        self.now_us = 1_000 * SECOND
        self.holds: dict[str, Hold] = {}
        #: Deployments without a hold, and since when.
        self.waiting: dict[int, int] = {}
        self.homeless: set[int] = set()
        self.ends_us: dict[int, int] = {}
        self.not_before_us = 0
        self.numbers = 0
        self.log: list[tuple[int, HoldAction]] = []
        self.killed: list[str] = []

    # ---- what the daemon sees and does ----------------------------------------------------

    def views(self) -> list[HoldView]:
        shown = []
        for hold in self.holds.values():
            view, used = hold.view, bool(hold.living)
            idle = view.idle_since_us
            if used or not view.ready:
                idle = None
            elif idle is None:
                idle = self.now_us
            hold.view = replace(
                view, in_use=used, idle_since_us=idle, drained=view.draining and not used
            )
            shown.append(hold.view)
        left = self._all_could_leave()
        for number, view in enumerate(shown):
            since_us = self.now_us if view.vacant_since_us is None else view.vacant_since_us
            vacant = replace(view, vacant_since_us=since_us if view.id == left else None)
            shown[number] = self.holds[view.id].view = vacant
        return shown

    def _all_could_leave(self) -> str | None:
        used = [hold for hold in self.holds.values() if is_open(hold.view) and hold.living]
        for hold in sorted(used, key=lambda each: len(each.living)):
            room = sum(SLOTS - len(other.living) for other in used if other is not hold)
            if len(hold.living) <= room:
                return hold.view.id
        return None

    def demand(self) -> Demand:
        since_us = min(self.waiting.values(), default=None)
        return Demand(waiting_since_us=since_us, homeless=bool(self.homeless))

    def decide(self, at_us: int) -> tuple[HoldAction, ...]:
        return decide(
            at_us, self.views(), self.demand(), self.rules, not_before_us=self.not_before_us
        )

    def carry_out(self, action: HoldAction) -> None:
        self.log.append((self.now_us, action))
        match action:
            case Submit(replaces=replaces):
                if self.rng.random() < self.trouble.rejects:
                    self.not_before_us = self.now_us + 30 * SECOND
                    return
                self.numbers += 1
                view = HoldView(
                    id=f"h{self.numbers}",
                    phase=HoldPhase.PENDING,
                    submitted_us=self.now_us,
                    replaces=replaces,
                )
                self.holds[view.id] = Hold(view, self.now_us + self.rng.randint(0, 30) * SECOND)
            case Extend(hold=name, limit_us=limit_us):
                hold = self.holds[name]
                if self.trouble.refuses_extensions:
                    hold.view = replace(hold.view, extend_refused=True)
                else:
                    assert hold.view.started_us is not None
                    end_us = hold.view.started_us + limit_us
                    hold.view = replace(hold.view, limit_end_us=end_us)
            case Drain(hold=name):
                hold = self.holds[name]
                hold.view = replace(hold.view, draining=True)
                hold.drained_us = self.now_us + self.rng.randint(0, 12) * SECOND
            case Undrain(hold=name):
                hold = self.holds[name]
                hold.view = replace(hold.view, draining=False)
            case Release(hold=name):
                hold = self.holds[name]
                assert not hold.living, f"{name} was released while something lived on it"
                hold.view = replace(hold.view, phase=HoldPhase.ENDING)
                hold.gone_us = self.now_us + self.rng.randint(0, 3) * TICK_US

    # ---- what happens ---------------------------------------------------------------------

    def run(self, seconds: int) -> None:
        until_us = self.now_us + seconds * SECOND
        while self.now_us < until_us:
            self.now_us += TICK_US
            self._slurm()
            self._jobs()
            self._settle()
            self._check()

    def be_quiet(self) -> None:
        """Only what is lasting stays of the trouble."""
        lasting = self.trouble
        self.trouble = Trouble(
            room=lasting.room, refuses_extensions=lasting.refuses_extensions, jobs=0
        )

    def add_job(self, *, lives_s: int) -> None:
        self.numbers += 1
        self.waiting[self.numbers] = self.now_us
        self.ends_us[self.numbers] = self.now_us + lives_s * SECOND

    def _slurm(self) -> None:
        for name, hold in list(self.holds.items()):
            view = hold.view
            if view.phase is HoldPhase.ENDING:
                if self.now_us >= hold.gone_us:
                    del self.holds[name]
            elif view.phase is HoldPhase.PENDING:
                taken = [h for h in self.holds.values() if h.view.phase is not HoldPhase.PENDING]
                if self.now_us >= hold.starts_us and len(taken) < self.trouble.room:
                    assert self.rules.time_limit_us is not None
                    hold.view = replace(
                        view,
                        phase=HoldPhase.RUNNING,
                        started_us=self.now_us,
                        limit_end_us=self.now_us + self.rules.time_limit_us,
                    )
                    hold.ready_us = self.now_us + self.rng.randint(0, 20) * SECOND
            else:
                self._running(name, hold)

    def _running(self, name: str, hold: Hold) -> None:
        view, chance = hold.view, self.rng.random
        assert view.limit_end_us is not None
        if self.now_us >= view.limit_end_us:
            if hold.living:
                self.killed.append(name)
            self._evict(hold)
            del self.holds[name]
            return
        if chance() < self.trouble.requeues:
            self._evict(hold)
            hold.view = replace(
                HoldView(id=name, phase=HoldPhase.PENDING, submitted_us=view.submitted_us),
                replaces=view.replaces,
                draining=view.draining,
            )
            hold.starts_us = self.now_us + 30 * SECOND
            return
        if chance() < self.trouble.losses:
            fate = self.rng.randrange(3)
            view = replace(
                view,
                whole=False,
                lost_nodes=view.lost_nodes + 1,
                batch_lost=view.batch_lost or fate == 0,
                useless=view.useless or fate == 1,
            )
            if view.useless:
                self._evict(hold)
        hold.view = replace(view, ready=self.now_us >= hold.ready_us and not view.useless)
        if view.draining and self.now_us >= hold.drained_us:
            self._evict(hold)

    def _evict(self, hold: Hold) -> None:
        self.homeless |= hold.living
        hold.living.clear()

    def _jobs(self) -> None:
        if self.rng.random() < self.trouble.jobs:
            self.add_job(lives_s=self.rng.randint(20, 1500))
        for number, end_us in list(self.ends_us.items()):
            if self.now_us >= end_us:
                self.forget(number)
        for number in [*sorted(self.homeless), *list(self.waiting)]:
            homes = [h for h in self.holds.values() if is_open(h.view) and len(h.living) < SLOTS]
            if homes:
                homes[0].living.add(number)
                self.homeless.discard(number)
                self.waiting.pop(number, None)

    def forget(self, number: int) -> None:
        del self.ends_us[number]
        self.waiting.pop(number, None)
        self.homeless.discard(number)
        for hold in self.holds.values():
            hold.living.discard(number)

    # ---- what must hold -------------------------------------------------------------------

    def _settle(self) -> None:
        """Decide until nothing is left to do; no action comes twice at one instant."""
        done: list[HoldAction] = []
        for _ in range(6):
            actions = self.decide(self.now_us)
            for action in actions:
                assert action.reason.strip()
                assert action not in done or (isinstance(action, Submit) and not action.replaces)
                done.append(action)
                self.carry_out(action)
            if not actions:
                self._sleep()
                return
        raise AssertionError(f"it never comes to rest: {done}")

    def _sleep(self) -> None:
        """Until the next look nothing changes by time alone."""
        look_us = next_look_us(
            self.now_us, self.views(), self.demand(), self.rules, not_before_us=self.not_before_us
        )
        last_us = self.now_us + 3_600 * SECOND if look_us is None else look_us - 1
        assert last_us >= self.now_us
        assert self.decide(last_us) == ()

    def _check(self) -> None:
        live = [h.view for h in self.holds.values() if h.view.phase is not HoldPhase.ENDING]
        names = {view.id for view in live}
        replaced = {view.replaces for view in live} & names
        assert len(live) <= self.rules.max + len(replaced), [view.id for view in live]
        assert len([v for v in live if v.replaces in names]) == len(replaced), "replaced twice"
        assert not self.killed, f"{self.killed} met their limit in use"


def is_open(view: HoldView) -> bool:
    """Deployments may be put on it."""
    return view.phase is HoldPhase.RUNNING and view.ready and not view.draining
