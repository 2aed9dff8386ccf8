"""``trainer_run/checkpoint-3`` and ``checkpoint-6``: a real ``transformers.Trainer`` run on CPU.

A random Llama with tied embeddings (``lm_head.weight`` is not stored), AdamW with a decay and a no-decay
group, linear warm-up. The optimizer's ids are integers: names must come from the order of the two groups.
"""

from __future__ import annotations

import shutil

import torch
from common import publish
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCAB = 256


class Tokens(torch.utils.data.Dataset):
    """24 rows of random tokens, the same each time."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, VOCAB, (24, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=88,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    arguments = TrainingArguments(
        output_dir="trainer_run",
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        warmup_steps=2,
        learning_rate=3e-3,
        weight_decay=0.1,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    Trainer(model=model, args=arguments, train_dataset=Tokens()).train()


if __name__ == "__main__":
    with publish("trainer_run"):
        main()
        shutil.rmtree("trainer_run/runs", ignore_errors=True)
