"""What the convergence benchmark learns: real data that Python and scikit-learn carry, models made from scratch."""

from __future__ import annotations

import sys
import sysconfig
import typing
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "demo"))


class Sources:
    """A byte-level GPT of 25.5 M parameters on the Python library's own sources; every tenth file is held out."""

    metric = "validation loss, nats a byte"
    lower_is_better = True
    #: By optimizer; warmed up, then down along a cosine.
    rates: typing.ClassVar = {"sgd": 0.1, "adamw": 6e-4}
    clip = 1.0  # of the gradients' norm
    width, layers, heads, length, batch, validation = 512, 8, 8, 256, 32, 64

    def __init__(self, device, smoke):
        if smoke:
            self.width, self.layers, self.heads, self.length, self.batch, self.validation = 64, 2, 2, 64, 8, 4
        self.device = device
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
        files = [f for f in files if not {"site-packages", "dist-packages", "test", "tests"} & set(f.parts)]
        if not files:
            raise SystemExit("convergence: this Python comes without its library's sources")
        held_out = files[5::10]
        self.train = self._bytes([f for f in files if f not in set(held_out)])
        self.held_out = self._bytes(held_out)
        self.text = f"byte-level GPT, {len(self.train) / 1e6:.1f} MB of Python sources, {len(held_out)} files held out"

    def _bytes(self, files):
        return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)

    def model(self):
        from train_models import UntiedTransformer

        made = UntiedTransformer(self.layers, self.width, self.heads, 256, self.length)
        for name, parameter in made.named_parameters():  # GPT-2's: with larger ones runs of one seed part by chance
            if parameter.dim() > 1 and name != "position":
                nn.init.normal_(parameter, std=0.02)
        return made.to(self.device)

    def loss(self, model, step, rank, seed):
        source = torch.Generator().manual_seed((seed * 1_000_003 + step) * 4096 + rank)
        starts = torch.randint(len(self.train) - self.length - 1, (self.batch,), generator=source)
        return self._loss_of(model, self.train, starts)

    def _loss_of(self, model, data, starts):
        rows = torch.stack([data[s : s + self.length + 1] for s in starts.tolist()]).to(self.device).long()
        logits = model(rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    @torch.no_grad()
    def score(self, model):
        source = torch.Generator().manual_seed(7)
        total = 0.0
        for _ in range(self.validation):
            starts = torch.randint(len(self.held_out) - self.length - 1, (self.batch,), generator=source)
            total += float(self._loss_of(model, self.held_out, starts))
        return total / self.validation


class Digits:
    """ResNet-18 on scikit-learn's handwritten digits, enlarged to 32 × 32; 2,500 samples are held out."""

    metric = "test accuracy"
    lower_is_better = False
    rates: typing.ClassVar = {"sgd": 0.05, "adamw": 1e-3}
    clip = None
    batch = 64

    def __init__(self, device, smoke):
        import train

        self.device, self.data = device, train.Digits()
        self.smoke = smoke
        if smoke:
            self.batch = 8
        self.text = f"ResNet-18, {len(self.data.train_y)} images of digits and their shifts, 2,500 held out"

    def model(self):
        if self.smoke:
            return nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
        import torchvision

        model = torchvision.models.resnet18(weights=None, num_classes=10)
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)  # small images: no stride before the first block
        model.maxpool = nn.Identity()
        return model.to(self.device, memory_format=torch.channels_last)

    def _enlarged(self, flat):
        images = flat.view(-1, 1, 8, 8).to(self.device)
        images = nn.functional.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
        return images.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)

    def loss(self, model, step, rank, seed):
        images, labels = self.data.batch(step, rank, seed, self.batch)
        return nn.functional.cross_entropy(model(self._enlarged(images)).float(), labels.to(self.device))

    @torch.no_grad()
    def score(self, model):
        model.eval()
        right = 0
        for images, labels in zip(self.data.test_x.split(500), self.data.test_y.split(500)):
            right += int((model(self._enlarged(images)).argmax(1).cpu() == labels).sum())
        model.train()
        return right / len(self.data.test_y)


TASKS = {"gpt": Sources, "resnet": Digits}
