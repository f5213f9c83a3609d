"""The models of the training benchmark: random weights, synthetic input, as the field measures them.

Each builder returns a Workload. Parameters are the same on every rank, the batch is its own. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

#: Of SGD.
MOMENTUM = 0.9


@dataclasses.dataclass
class Workload:
    """A module, its batch, and how its loss comes from both."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    loss: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    text: str


def _sgd(parameters):
    parameters = list(parameters)
    return torch.optim.SGD(parameters, lr=1e-3, momentum=MOMENTUM, fused=parameters[0].device.type == "cuda")


def _adamw(parameters):
    parameters = list(parameters)
    return torch.optim.AdamW(parameters, lr=1e-5, fused=parameters[0].device.type == "cuda")


def _own_batch(rank):
    """From here on random numbers are the rank's: gradients of one batch on all ranks would be all alike."""
    torch.manual_seed(1 + rank)


def _image_loss(module, inputs):
    images, labels = inputs
    out = module(images)
    if isinstance(out, tuple):  # Inception's second head
        return nn.functional.cross_entropy(out[0], labels) + 0.4 * nn.functional.cross_entropy(out[1], labels)
    return nn.functional.cross_entropy(out, labels)


def _image(name, batch, side, **arguments):
    def build(device, rank=0):
        import torchvision

        module = getattr(torchvision.models, name)(weights=None, **arguments)
        module = module.to(device, memory_format=torch.channels_last)
        _own_batch(rank)
        images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (batch,), device=device)
        return Workload(module, (images, labels), _image_loss, _sgd, f"torchvision {name}, batch {batch}, SGD")

    return build


def _causal_loss(module, inputs):
    return module(input_ids=inputs[0], labels=inputs[0]).loss


def _masked_loss(module, inputs):
    return module(input_ids=inputs[0], labels=inputs[1]).loss


def _gpt2(layers, width, heads, batch=8, length=512, vocabulary=50257, name="GPT-2 medium"):
    def build(device, rank=0):
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=1024, use_cache=False
        )
        module = GPT2LMHeadModel(config).to(device)
        _own_batch(rank)
        tokens = torch.randint(vocabulary, (batch, length), device=device)
        return Workload(module, (tokens,), _causal_loss, _adamw, f"{name}, tied head, {batch}×{length}, AdamW")

    return build


def _bert(layers, width, heads, batch=8, length=512, vocabulary=30522, name="BERT-large"):
    def build(device, rank=0):
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            vocab_size=vocabulary,
        )
        module = BertForMaskedLM(config).to(device)
        _own_batch(rank)
        tokens = torch.randint(vocabulary, (batch, length), device=device)
        labels = torch.where(torch.rand(batch, length, device=device) < 0.15, tokens, torch.full_like(tokens, -100))
        return Workload(module, (tokens, labels), _masked_loss, _adamw, f"{name}, tied head, {batch}×{length}, AdamW")

    return build


class UntiedTransformer(nn.Module):
    """A causal transformer whose embedding and output layer are two matrices."""

    def __init__(self, layers, width, heads, vocabulary, length):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.layers(self.embedding(tokens) + self.position[:length], mask=mask, is_causal=True)
        return self.head(hidden)


def _next_token_loss(module, inputs):
    logits = module(inputs[0])
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[0][:, 1:].flatten())


def _untied(layers, width, heads, batch=8, length=512, vocabulary=50257):
    def build(device, rank=0):
        module = UntiedTransformer(layers, width, heads, vocabulary, length).to(device)
        _own_batch(rank)
        tokens = torch.randint(vocabulary, (batch, length), device=device)
        return Workload(
            module, (tokens,), _next_token_loss, _adamw, f"transformer, untied head, {batch}×{length}, AdamW"
        )

    return build


class _TinyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
        self.head = nn.Sequential(nn.Linear(128, 4096), nn.ReLU(), nn.Linear(4096, 1000))

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def _tiny(device, rank=0):
    module = _TinyNet().to(device)
    _own_batch(rank)
    images = torch.randn(4, 3, 16, 16, device=device)
    labels = torch.randint(1000, (4,), device=device)
    return Workload(module, (images, labels), _image_loss, _sgd, "a small CNN, batch 4, SGD")


MODELS = {
    "resnet50": _image("resnet50", 256, 224),
    "vgg16": _image("vgg16", 128, 224),
    "gpt2": _gpt2(24, 1024, 16),
    "bert": _bert(24, 1024, 16),
    "untied": _untied(12, 1024, 16),
    "resnet101": _image("resnet101", 128, 224),
    "inception": _image("inception_v3", 128, 299, init_weights=False),
}
#: What `--smoke` trains in their place.
SMOKE = {
    "resnet50": _tiny,
    "vgg16": _tiny,
    "gpt2": _gpt2(2, 64, 2, batch=2, length=16, vocabulary=500, name="a small GPT-2"),
    "bert": _bert(2, 64, 2, batch=2, length=16, vocabulary=500, name="a small BERT"),
    "untied": _untied(2, 64, 2, batch=2, length=16, vocabulary=500),
    "resnet101": _tiny,
    "inception": _tiny,
}
