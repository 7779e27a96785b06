"""Scripts that both readers of ``#PLEXRL`` lines must understand in the same way."""

import random
from typing import Final

#: Heads of scripts below ``#!/bin/bash``, each with words of the sentence; "" if it is good.
CASES: Final = (
    ("", ""),
    ("#PLEXRL --model=tiny", ""),
    ("#PLEXRL --model=tiny --model judge", ""),
    ("#PLEXRL --qos=fast --seed=1", ""),
    ("#PLEXRL --qos 9-a.b_c", ""),
    ("#PLEXRL --qos='a b'", "qos 'a b' is not a name"),
    ("#PLEXRL --qos=-fast", "qos '-fast' is not a name"),
    ("#PLEXRL --qos=a --qos=b", "given twice"),
    ("#PLEXRL --qs=a", "did you mean --qos?"),
    ("#PLEXRL --seed 7 --priority=2 --max-slowdown=1.25", ""),
    ("#SBATCH -J x\n\n  # note\n#PLEXRL\t--model 'tiny'  # a comment", ""),
    ('#PLEXRL --model="ti"n\\y#cut', ""),
    ("#PLEXRL --seed=9223372036854775807 --priority=1000", ""),
    ("#PLEXRL --seed=0009 --max-slowdown=01", ""),
    ("cd /tmp\n#PLEXRL", ""),
    ("cd /tmp\n#PLEXRLx --zebra\n #PLEXRL --x", ""),
    ("#PLEXRL --modle=tiny", "did you mean --model?"),
    ("#PLEXRL --slowdown=2", "did you mean --max-slowdown?"),
    ("#PLEXRL --prio=2", "did you mean --priority?"),
    ("#PLEXRL --zebra=1", "known are --model, --seed"),
    ("#PLEXRL", "malformed"),
    ("#PLEXRL   ", "malformed"),
    ("#PLEXRL # nothing", "malformed"),
    ("#PLEXRL--model=tiny", "malformed"),
    ("#PLEXRL model=tiny", "'model=tiny' is not an option"),
    ("#PLEXRL --", "'--' is not an option"),
    ("#PLEXRL --=x", "'--=x' is not an option"),
    ('#PLEXRL "it\'s"', '"it\'s" is not an option'),
    ("#PLEXRL 'a\\\\b\"'\\'", "is not an option"),
    ("#PLEXRL --model", "--model needs a value"),
    ("#PLEXRL --model= tiny", "--model needs a value"),
    ("#PLEXRL --model --seed=1", "--model needs a value"),
    ("#PLEXRL --model=''", "--model needs a value"),
    ("#PLEXRL --model='tiny", "no closing ': close the quotes"),
    ("#PLEXRL --seed=1 '' --zebra", ""),
    ("#PLEXRL --model=tin\\y \\ --seed=1", "'\\\\' is not an option"),
    ("#PLEXRL --seed=7\\", "seed '7\\\\' is not"),
    ("#PLEXRL --model='ti ny'", "model 'ti ny' is not a name"),
    ("#PLEXRL --seed=x", "seed 'x' is not"),
    ("#PLEXRL --seed=9223372036854775808", "0 to 2**63 - 1"),
    ("#PLEXRL --seed=-1", "seed '-1' is not"),
    ("#PLEXRL --seed=1\n#PLEXRL --seed=2", "given twice (line 2 too)"),
    ("#PLEXRL --model=tiny\n#PLEXRL --model=tiny", "--model=tiny is given twice"),
    ("#PLEXRL --priority=0", "from 1 to 1000"),
    ("#PLEXRL --priority=1001", "from 1 to 1000"),
    ("#PLEXRL --priority=0x10", "from 1 to 1000"),
    ("#PLEXRL --max-slowdown=0.5", "from 1.0"),
    ("#PLEXRL --max-slowdown=1e2", "from 1.0"),
    ("#PLEXRL --max-slowdown=1.", "from 1.0"),
    ("cd /tmp\n#PLEXRL --model=tiny", "move it up"),
    ("#SBATCH -J x\ncd /tmp\n\n\n#PLEXRL\t--zebra", "move it up"),
)
#: Models that both know.
MODELS: Final = ("tiny", "judge")
_GOOD: Final = (
    *("--model=tiny", "--model judge", "--model='tiny'", '--model "jud"ge', "--seed=7"),
    *("--seed 12", "--priority=3", "--max-slowdown=1.5", "\n#PLEXRL --model=judge"),
    *("\n#SBATCH -J x\n#PLEXRL --priority 9", "\n\n# note\n#PLEXRL\t--seed 1", "# rest"),
)
_BAD: Final = (
    *("--modl=tiny", "--sed", "--max", "--seed=", "--priority=x", "--model=", "tiny", "1", "="),
    *("'", '"', "\\", "\\ ", "#", "%", "\t", "'' ", "\n#PLEXRL", "\necho", "\n", "--model='ti ny'"),
)


def script(head: str) -> str:
    """A whole script with that head."""
    return f"#!/bin/bash\n{head}\npython train.py\n"


def random_heads(count: int) -> list[str]:
    """Heads put together by chance, the same ones every time."""
    chance = random.Random(7)

    def piece() -> str:
        return chance.choice(_GOOD if chance.random() < 0.7 else _BAD)

    return [
        "#PLEXRL " + "".join(piece() + chance.choice((" ", " ", "")) for _ in range(length))
        for length in (chance.randrange(1, 6) for _ in range(count))
    ]
