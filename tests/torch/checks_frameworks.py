"""Hugging Face's Trainer, Accelerate and Lightning with one import more; tiny models built here, on the CPU."""

import os
import tempfile

import torch
import torch.distributed as dist
from checks import check, run
from models import assert_same_on_all_ranks

import paceline.torch  # noqa: F401
from paceline._torch import ddp

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def communicators_operations(model):
    return ddp.attachment_of(model).endpoint.communicator.stats()["operations"]


def only_model():
    """The one DDP model that a framework wrapped."""
    (model,) = list(ddp._attached)
    return model


@check
def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(2, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    before = communicators_operations(model)
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert communicators_operations(model) - before >= len(loader)
    assert_same_on_all_ranks(list(model.parameters()))
    ddp._attached.clear()


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
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(2)
    rows = [
        {"input_ids": torch.randint(50, (8,), generator=generator), "labels": torch.tensor(i % 2)} for i in range(32)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
    wrapped = only_model()
    assert communicators_operations(wrapped) >= 3
    assert_same_on_all_ranks(list(wrapped.parameters()))
    ddp._attached.clear()


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
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6, generator=generator), torch.randint(2, (32,)))
    wrapped = []

    class Look(lightning.Callback):
        def on_train_end(self, trainer, module):
            model = trainer.strategy.model
            wrapped.append(communicators_operations(model))
            assert_same_on_all_ranks(list(model.parameters()))

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
        trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
    assert wrapped and wrapped[0] >= 3, wrapped


@check
def all_of_them_ran_distributed():
    assert dist.is_initialized() and dist.get_world_size() == SIZE and dist.get_rank() == RANK


if __name__ == "__main__":
    run()
