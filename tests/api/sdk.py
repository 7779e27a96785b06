"""The tinker SDK for tests, and builders of what it sends."""

import os
import warnings
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"
with warnings.catch_warnings():
    # Importing the SDK imports torch and transformers, whose warnings are not ours.
    warnings.simplefilter("ignore")
    import tinker
    from tinker import types

__all__ = ["POLICY", "WAIT", "datum", "logprobs", "prompt", "tinker", "types"]

WAIT = 20.0
#: Inputs of the policy losses for two tokens.
POLICY = {"logprobs": [-1.0, -2.0], "advantages": [1.0, 1.0]}


def prompt(*tokens: int) -> Any:
    return types.ModelInput.from_ints(list(tokens))


def datum(*tokens: int, **inputs: Any) -> Any:
    given: Any = {"target_tokens": [*tokens[1:], 0], **inputs}
    return types.Datum(model_input=prompt(*tokens), loss_fn_inputs=given)


def logprobs(output: Any, index: int = 0) -> list[float]:
    return [round(float(each), 4) for each in output.loss_fn_outputs[index]["logprobs"].data]
