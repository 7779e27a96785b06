"""Long training calls in parts of bounded length, and their results put together again."""

from collections.abc import Sequence

from plexrl_slurm import wire


def tokens_of(body: wire.Body) -> int:
    """Tokens a call touches, for estimates and for splitting."""
    match body:
        case wire.ForwardBackward(data=data):
            return sum(datum.tokens.shape[0] for datum in data)
        case wire.Sample():
            return len(body.prompt) + body.num_samples * body.max_tokens
        case _:
            return 0


def cuts(body: wire.Body, *, max_tokens: int) -> list[int]:
    """Index of the first datum of every part; parts hold at most ``max_tokens`` or one datum."""
    if not isinstance(body, wire.ForwardBackward):
        return [0]
    starts, filled = [0], 0
    for index, datum in enumerate(body.data):
        size = datum.tokens.shape[0]
        if filled and filled + size > max_tokens:
            starts.append(index)
            filled = 0
        filled += size
    return starts


def cut(body: wire.ForwardBackward, *, part: int, max_tokens: int) -> wire.ForwardBackward:
    """Part ``part`` of the call."""
    starts = [*cuts(body, max_tokens=max_tokens), len(body.data)]
    return wire.ForwardBackward(
        data=body.data[starts[part] : starts[part + 1]],
        loss_fn=body.loss_fn,
        loss_fn_config=body.loss_fn_config,
        forward_only=body.forward_only,
    )


def join(parts: Sequence[wire.Result]) -> wire.Result:
    """The whole call's result. Sums add up, means weigh by number of sequences."""
    outputs = [part for part in parts if isinstance(part, wire.TrainOutput)]
    if len(outputs) != len(parts) or len(outputs) == 1:
        return parts[-1]
    sizes = [max(1, len(output.logprobs)) for output in outputs]
    metrics: dict[str, float] = {}
    for name in outputs[0].metrics:
        values = [output.metrics[name] for output in outputs if name in output.metrics]
        match name.rpartition(":")[2]:
            case "sum":
                metrics[name] = sum(values)
            case "min":
                metrics[name] = min(values)
            case "max":
                metrics[name] = max(values)
            case _:
                weighted = sum(value * size for value, size in zip(values, sizes, strict=False))
                metrics[name] = weighted / sum(sizes[: len(values)])
    return wire.TrainOutput(
        logprobs=[array for output in outputs for array in output.logprobs], metrics=metrics
    )
