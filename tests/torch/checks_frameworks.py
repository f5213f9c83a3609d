"""Hugging Face's Trainer, Accelerate and Lightning with one import more, against themselves without it.

Tiny models built here, on the CPU. What is compared must tell a sum from an average: plain SGD, and no clipping unless
the norms themselves are compared.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from checks import check, run
from models import assert_same_on_all_ranks, paceline_off
from torch.nn.parallel import DistributedDataParallel

import paceline.torch  # noqa: F401
from paceline._torch import ddp, endpoints

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def operations():
    """What has travelled through Paceline; frameworks make the process group themselves."""
    return endpoints.of(dist.group.WORLD).communicator.stats()["operations"] if dist.is_initialized() else 0


def compare(loop, steps):
    """loop() trains from seeds of its own and returns the model as DDP wrapped it, and what else must be equal."""
    before = operations()
    ours, *more = loop()
    assert isinstance(ours, DistributedDataParallel) and ddp.attachment_or_none(ours) is not None
    assert operations() - before >= steps
    assert_same_on_all_ranks(list(ours.parameters()))
    before = operations()
    with paceline_off():
        plain, *more_of_plain = loop()
    assert isinstance(plain, DistributedDataParallel) and plain is not ours
    assert operations() == before and ddp.attachment_or_none(plain) is None
    torch.testing.assert_close(list(ours.parameters()), list(plain.parameters()), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(more, more_of_plain, rtol=1e-5, atol=0.0)


@check
def accelerate():
    from accelerate import Accelerator

    def loop():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        inputs, labels = torch.randn(64, 6, generator=generator), torch.randint(2, (64,), generator=generator)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=8)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        norms = []
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
        assert len(norms) == 64 // 8 // SIZE and min(norms) > 0.1, norms
        return model, norms

    compare(loop, 64 // 8 // SIZE)


@check
def hugging_face_trainer():
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )

    def loop():
        torch.manual_seed(0)
        model = BertForSequenceClassification(config)
        generator = torch.Generator().manual_seed(2)
        rows = [
            {"input_ids": torch.randint(50, (8,), generator=generator), "labels": torch.tensor(i % 2)}
            for i in range(32)
        ]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=3,
                per_device_train_batch_size=4,
                optim="sgd",
                learning_rate=0.1,
                max_grad_norm=0.0,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_strategy="no",
            )
            trainer = Trainer(model=model, args=arguments, train_dataset=rows)
            trainer.train()
        return [trainer.model_wrapped]

    compare(loop, 3)


@check
def lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(6, 2)

        def training_step(self, batch, _index):
            inputs, labels = batch
            return torch.nn.functional.cross_entropy(self.layer(inputs), labels)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    os.environ["TORCHELASTIC_RUN_ID"], os.environ["GROUP_RANK"] = "test", "0"  # as torchrun sets them

    def loop():
        generator = torch.Generator().manual_seed(3)
        inputs, labels = torch.randn(32, 6, generator=generator), torch.randint(2, (32,), generator=generator)
        wrapped = []

        class Look(lightning.Callback):
            def on_train_end(self, trainer, module):
                wrapped.append(trainer.strategy.model)

        with tempfile.TemporaryDirectory() as folder:
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=SIZE,
                strategy="ddp",
                max_steps=3,
                callbacks=[Look()],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            data = torch.utils.data.TensorDataset(inputs, labels)
            trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
        return wrapped

    compare(loop, 3)


@check
def all_of_them_ran_distributed():
    assert dist.is_initialized() and dist.get_world_size() == SIZE and dist.get_rank() == RANK


if __name__ == "__main__":
    run()
