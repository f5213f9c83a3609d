"""Gradients that travel by rows: those of embeddings, of which a step looks up few rows and leaves the others zero.

A bucket is cut into such weights and what lies between them. Which rows travel is seen on the device, by their values:
the rule below only finds where looking pays. A weight of which most rows are not zero after all (a functional use that
the modules do not show) adds up as well, and goes dense from the next step on (`row_elements` in paceline/cuda.h).
"""

from torch import nn

from paceline import _cuda, _state
from paceline import communicator as core
from paceline._torch.start_lines import say_once

#: What is smaller takes no more time on the wire than the operation more costs that it would be.
LEAST_BYTES = 1 << 20
#: Codecs with residuals send less by themselves.
_CODECS = ("none", "fp16", "bf16")
_ALIGN = 16


def of_model(module, codec):
    """{id of a parameter: elements of its rows} of the gradients that travel by rows.

    They are the weights of nn.Embedding and nn.EmbeddingBag (sparse=False) that no other module has: the gradient of a
    head that is tied to the embedding, as GPT-2's and BERT's, is dense.
    """
    if codec not in _CODECS or core.setting("sparse_rows", _state.face) == "off":
        return {}
    owners = {}
    for one in module.modules():
        for parameter in one._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {
        id(one.weight): one.weight.shape[1]
        for one in module.modules()
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag))
        and not one.sparse
        and owners.get(id(one.weight)) == 1
        and _fits(one.weight)
    }


def _fits(weight):
    """Of a type that the path reduces, in rows that lie one after the other, and worth it."""
    known = str(weight.dtype).removeprefix("torch.") in _cuda.DTYPES
    large = weight.numel() * weight.element_size() >= LEAST_BYTES
    return known and large and weight.requires_grad and weight.dim() == 2 and weight.is_contiguous()


def parts(parameters, rows, item):
    """[(first element, elements, elements of its rows or 0, parameter or None)] of a bucket of these parameters.

    item: bytes of an element. Empty where the bucket travels whole: it has no such weight, or one of the parts would
    not be aligned as the path asks. A function of what is the same on all ranks.
    """
    cut, begin, at = [], 0, 0
    for parameter in parameters:
        elements = rows.get(id(parameter))
        if elements:
            if at > begin:
                cut.append((begin, at - begin, 0, None))
            cut.append((at, parameter.numel(), elements, parameter))
            begin = at + parameter.numel()
        at += parameter.numel()
    if not begin:
        return []
    if at > begin:
        cut.append((begin, at - begin, 0, None))
    return [] if any(first * item % _ALIGN for first, *_ in cut) else cut


def say(rows, keyed_parameters):
    """One line on rank 0: which weights, how many rows at most, of how many bytes."""
    found = [
        f"{name} (at most {parameter.shape[0]} rows of {rows[id(parameter)]}, "
        f"{parameter.numel() * parameter.element_size() / 1e6:.1f} MB if dense)"
        for name, parameter, _ in keyed_parameters
        if id(parameter) in rows
    ]
    if found:
        say_once(
            f"of these gradients only the rows that are not zero travel: {', '.join(found)}; "
            "PACELINE_SPARSE_ROWS=off sends all",
        )
