"""One more forward of a step, without gradients, and the attention logits in it."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.attention_logits import max_logits
from meshwright.models.decoder import Routing
from meshwright.models.loss import Batch, SummedLoss
from meshwright.models.table import DecoderSpec
from meshwright.parallelisms.context_parallel import keys_seen
from meshwright.parallelisms.data_parallel import reset_after_no_grad
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.routing_replay import routed

NoteLogits = Callable[[int, Tensor], None]
"""Takes the number of a layer, and the largest logit of each of this rank's heads in it, (N/tp,)
fp32."""


def layers_with_logits(spec: DecoderSpec) -> list[int]:
    """Return the layers whose attention logits can be computed: only our core is known to compute
    them from its arguments."""
    return [
        number
        for number, one in spec.attentions.items()
        if "core" in one.bare_modules and not one.has_own_core
    ]


def forward_once_more(model: LocalModel, batches: Sequence[Batch], positions: Tensor) -> None:
    """Run a forward of every microbatch, to be listened to by hooks.

    It runs eagerly, without gradients and without a loss, and its experts are counted nowhere, so
    the step itself computes what it would without. Collective.

    Args:
        batches: tokens and labels are (B, S/cp).
        positions: (S/cp,) int64 of the tokens.
    """
    # routers choose by themselves, unseen by who records or prescribes the experts of the step
    unrouted = routed(model.stages, Routing())
    with torch.no_grad(), _eager(model), unrouted, model.with_loss(_NoLoss):
        model.forward_all(batches, positions, lambda *_: None)
    reset_after_no_grad(model.stages)


def watch_logits(
    stack: ExitStack, model: LocalModel, meshes: Meshes, positions: Tensor, note: NoteLogits
) -> None:
    """Have `note` called with the largest logits of each layer of this rank that has some, at each
    forward until `stack` is left. All ranks of a cp group have to watch."""
    for stage in model.stages:
        for number in layers_with_logits(stage.table):
            if str(number) in stage.layers:
                core = stage.get_submodule(f"layers.{number}.attention.core")
                see = partial(_see_logits, partial(note, number), meshes, positions)
                hook = core.register_forward_pre_hook(see, with_kwargs=True)
                stack.callback(hook.remove)


def _see_logits(
    note: Callable[[Tensor], None],
    meshes: Meshes,
    positions: Tensor,
    _: nn.Module,
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> None:
    """Note the largest logits of attention to the arguments of `CausalAttention`."""
    q, k, _values, *masks = args
    places = None
    if k.shape[2] < positions.numel() * meshes.cp.size():  # latent attention has gathered them
        k, places = keys_seen(k, options.get("window"), meshes.cp)
    given = {key: value for key, value in options.items() if key in ("window", "soft_cap")}
    given |= {"positions": positions, "key_positions": places}
    mask = masks[0] if masks else None
    note(max_logits(q, k, mask, scale=options["scale"], **given))


class _NoLoss(SummedLoss):
    """Replaces a model's loss, which nobody needs here."""

    def __init__(self, _: SummedLoss) -> None:
        super().__init__()

    def __call__(
        self, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor | None = None
    ) -> Tensor:
        return torch.zeros((), device=x.device)


@contextmanager
def _eager(model: LocalModel) -> Iterator[None]:
    """Within, blocks run as if they weren't compiled, so that hooks inside them aren't, either.
    Masks and cores of attention stay as they are: uncompiled, flex attention makes a matrix of all
    pairs of tokens."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes 0.8 s
        yield
        return

    def in_default_stance(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with torch.compiler.set_stance("default"):
                return make(*args)

        return call

    with torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        for stage in model.stages:
            stage.masks = in_default_stance(stage.masks)  # type: ignore[method-assign]
            stack.callback(delattr, stage, "masks")
            for name, module in stage.named_modules():
                if name.endswith(".attention.core"):
                    before = module.register_forward_pre_hook(_set_default_stance)
                    after = module.register_forward_hook(_set_eager_stance)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
        yield


def _set_default_stance(*_: object) -> None:
    torch.compiler.set_stance("default")


def _set_eager_stance(*_: object) -> None:
    torch.compiler.set_stance("force_eager")
