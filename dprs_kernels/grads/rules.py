"""How each kind of layer makes per-sample gradients from its input and the gradient of its output.

A rule takes (module, inputs, e, memory) with e the gradient of the loss with respect to the module's output, batch
first, and yields (parameter, G) with G [n, *shape]. Shapes: n samples, T positions per sample. Where memory.rows names
the rows that a mask keeps, Linear, convolutions and Embedding make only these: RowGrads.

Which way a layer goes (the cost rule; times on 2 hyperthreads with AVX2, benchmarks/README.md):
    Linear, T = 1       the factors e, a where they are folded at once: nothing is stored. 0.4 to 0.6 of writing G into
                        an arena and folding it, at every width from 8 up; a GEMM for the norm and one for the sum would
                        take half of that again, but its sum is rounded in an order that depends on the other samples
    Linear, T > 1       one matrix product per sample into `memory`
    Conv1d, Conv2d      fp32 on the CPU: csrc/conv.h into `memory`, 0.2 to 0.8 of the next best over 25 geometries, but
                        2.0 for a depthwise 3x3, which torch has a kernel for; there, on other devices and for Conv3d
                        the batch folded into groups
    Embedding           zeros and a scatter into `memory`
    everything else     sums over positions, a few numbers per channel
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dprs_kernels import native
from dprs_kernels.grads.arena import Fresh
from dprs_kernels.outer import Grad, OuterProducts
from dprs_kernels.row_grads import RowGrads

Inputs = tuple[torch.Tensor, ...]
Pair = tuple[torch.Tensor, Grad]
Rule = Callable[[Any, Inputs, torch.Tensor, Fresh], Iterator[Pair]]


def wants(module: nn.Module, name: str) -> torch.Tensor | None:
    """The module's parameter of that name, if there is one and it is trained."""
    param = module._parameters.get(name)
    return param if param is not None and param.requires_grad else None


def linear(module: nn.Linear, inputs: Inputs, e: torch.Tensor, memory: Fresh) -> Iterator[Pair]:
    """G_i = sum_t e_it a_it^T: one matrix product per sample."""
    a = inputs[0]
    n = a.shape[0]
    a, e = a.reshape(n, -1, a.shape[-1]), e.reshape(n, -1, e.shape[-1])   # [n, T, in], [n, T, out]
    if (weight := wants(module, "weight")) is not None:
        rows = memory.rows(weight)
        if a.shape[1] == 1 and memory.outer_products:   # dropped rows are not made: nothing is, before it is read
            yield weight, OuterProducts(e.flatten(1), a.flatten(1))
        elif rows is None:
            yield weight, torch.bmm(e.transpose(1, 2), a, out=memory.empty(weight, n, e.dtype))
        else:
            some = e.index_select(2, rows.kept_on(e.device))
            out = memory.empty(weight, n, e.dtype, len(rows.kept))
            yield weight, RowGrads(torch.bmm(some.transpose(1, 2), a, out=out), rows)
    if (bias := wants(module, "bias")) is not None:
        yield bias, e.sum(1)


def conv(module: Any, inputs: Inputs, e: torch.Tensor, memory: Fresh) -> Iterator[Pair]:
    """G of any convolution: padding modes by padding first, then our own kernel or the batch folded into groups."""
    x, dims = inputs[0], len(module.kernel_size)
    if x.dim() == dims + 1:
        raise ValueError(f"{type(module).__name__}: input of shape {list(x.shape)} has no batch dimension")
    n = x.shape[0]
    weight = wants(module, "weight")
    # Rows of a grouped convolution do not meet the same inputs: there all are made.
    rows = None if weight is None or module.groups > 1 else memory.rows(weight)
    whole = e
    if rows is not None:
        e = e.index_select(1, rows.kept_on(e.device))   # [n, kept output channels, *positions]
    if (bias := wants(module, "bias")) is not None:
        together = rows is not None and memory.rows(bias) is rows
        sums = (e if together else whole).flatten(2).sum(2)
        yield bias, RowGrads(sums, rows) if rows is not None and together else sums
    if weight is None:
        return
    padding = list(module.padding) if not isinstance(module.padding, str) else [0] * dims
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x, padding = F.pad(x, module._reversed_padding_repeated_twice, mode=mode), [0] * dims
    if n == 0 or e.shape[1] == 0:
        none = x.new_zeros(n, e.shape[1], *weight.shape[1:])
        yield weight, none if rows is None else RowGrads(none, rows)
        return
    geometry = list(module.stride), padding, list(module.dilation)
    depthwise = tuple(weight.shape[1:]) == (1, 3, 3) and module.groups == module.out_channels
    ours = dims < 3 and not depthwise and native.library() is not None and all(
        t.device.type == "cpu" and t.dtype == torch.float32 for t in (x, e)
    )
    if ours:
        out = memory.empty(weight, n, e.dtype, e.shape[1])
        grad = _conv_native(x, e, out, *geometry, module.groups)
    else:
        grad = _conv_folded(x, e, torch.Size((e.shape[1], *weight.shape[1:])), *geometry, module.groups)
    yield weight, grad if rows is None else RowGrads(grad, rows)


def _conv_native(
    x: torch.Tensor, e: torch.Tensor, grad: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int],
    groups: int,
) -> torch.Tensor:   # fmt: skip
    out = grad
    if x.dim() == 3:   # one dimension is two, of height 1
        x, e, out = x.unsqueeze(2), e.unsqueeze(2), grad.unsqueeze(3)
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    native.conv_weight_grads(
        x.contiguous(), e.contiguous(), out, kernel=(out.shape[3], out.shape[4]), stride=(stride[0], stride[1]),
        padding=(padding[0], padding[1]), dilation=(dilation[0], dilation[1]), groups=groups,
    )   # fmt: skip
    return grad


def _conv_folded(
    x: torch.Tensor, e: torch.Tensor, shape: torch.Size, stride: list[int], padding: list[int], dilation: list[int],
    groups: int,
) -> torch.Tensor:   # fmt: skip
    """n convolutions of one sample each have their own weights: the weight gradient of the folded one is G."""
    n = x.shape[0]
    grad: torch.Tensor = torch.ops.aten.convolution_backward(
        e.reshape(1, n * e.shape[1], *e.shape[2:]), x.reshape(1, n * x.shape[1], *x.shape[2:]),
        x.new_empty(1).expand(n * shape[0], *shape[1:]), None, stride, padding, dilation,
        False, [0] * len(stride), n * groups, [False, True, False],
    )[1]   # fmt: skip
    return grad.view(n, *shape)


def embedding(module: nn.Embedding, inputs: Inputs, e: torch.Tensor, memory: Fresh) -> Iterator[Pair]:
    """G_i[v] = sum of e_it over the positions t that looked up v; the padding index learns nothing."""
    if (weight := wants(module, "weight")) is None:
        return
    n = inputs[0].shape[0]
    index, e = inputs[0].reshape(n, -1), e.reshape(n, -1, e.shape[-1])   # [n, T], [n, T, d]
    if module.padding_idx is not None:
        e = torch.where((index == module.padding_idx).unsqueeze(2), e.new_zeros(()), e)
    rows = memory.rows(weight)
    if rows is None:
        grad = memory.empty(weight, n, e.dtype).zero_()
        yield weight, grad.scatter_add_(1, index.unsqueeze(2).expand(e.shape), e)
        return
    count = len(rows.kept)   # what looked up a dropped row goes to one more, which is left out
    places = rows.places.to(index.device)[index]
    grad = memory.empty(weight, n, e.dtype, count + 1).zero_()
    grad.scatter_add_(1, torch.where(places < 0, count, places).unsqueeze(2).expand(e.shape), e)
    yield weight, RowGrads(grad[:, :count], rows)


def _affine(module: nn.Module, e: torch.Tensor, normed: torch.Tensor, keep: int) -> Iterator[Pair]:
    """y = weight * normed + bias over the last `keep` dimensions: sums over the positions between."""
    for name, product in (("weight", e * normed), ("bias", e)):
        if (param := wants(module, name)) is not None:
            yield param, product.reshape(e.shape[0], -1, *e.shape[e.dim() - keep :]).sum(1)


def layer_norm(module: nn.LayerNorm, inputs: Inputs, e: torch.Tensor, memory: Fresh) -> Iterator[Pair]:
    shape = module.normalized_shape
    return _affine(module, e, F.layer_norm(inputs[0], shape, eps=module.eps), len(shape))


def rms_norm(module: nn.RMSNorm, inputs: Inputs, e: torch.Tensor, memory: Fresh) -> Iterator[Pair]:
    shape = module.normalized_shape
    return _affine(module, e, F.rms_norm(inputs[0], shape, eps=module.eps), len(shape))


def _channels(module: nn.Module, e: torch.Tensor, normed: torch.Tensor) -> Iterator[Pair]:
    """y[:, c] = weight_c * normed[:, c] + bias_c."""
    for name, product in (("weight", e * normed), ("bias", e)):
        if (param := wants(module, name)) is not None:
            yield param, product.reshape(*e.shape[:2], -1).sum(2)


def group_norm(module: nn.GroupNorm, inputs: Inputs, e: torch.Tensor, memory: Fresh) -> Iterator[Pair]:
    return _channels(module, e, F.group_norm(inputs[0], module.num_groups, eps=module.eps))


def instance_norm(module: Any, inputs: Inputs, e: torch.Tensor, memory: Fresh) -> Iterator[Pair]:
    own = module.training or not module.track_running_stats
    normed = F.instance_norm(
        inputs[0], None if own else module.running_mean, None if own else module.running_var,
        use_input_stats=own, eps=module.eps,
    )   # fmt: skip
    return _channels(module, e, normed)


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear, nn.Conv1d: conv, nn.Conv2d: conv, nn.Conv3d: conv, nn.Embedding: embedding,
    nn.LayerNorm: layer_norm, nn.RMSNorm: rms_norm, nn.GroupNorm: group_norm,
    nn.InstanceNorm1d: instance_norm, nn.InstanceNorm2d: instance_norm, nn.InstanceNorm3d: instance_norm,
}   # fmt: skip


def rule_for(module: nn.Module) -> Rule | None:
    """By exact type: a subclass may compute something else."""
    return RULES.get(type(module))
