# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPO trainer, with its OpenEnv integration, on an environment that openenvd serves.

    pip install 'trl>=1.0' torch jmespath openenv
    openenvd launch echo
    python train_with_trl.py "$(openenvd address echo)" 2

`openenvd` is our command `openenv`, whose name the package `openenv` takes where it is installed
later.

An address is all that TRL needs: its `environment_factory` is a class whose public methods are the
model's tools. Each episode of a group has a session of its own, on as many replicas as there are.
Without a model's name (the third argument) a tiny random one is made, which needs no network and
no GPU: it calls no tool, and what it writes is sent to the environment at the episode's end.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from openenv import GenericEnvClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ADDRESS = sys.argv[1]
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 2
MODEL = sys.argv[3] if len(sys.argv) > 3 else None
PROMPT = "Say something long, with the tool."


class Echo:
    """One session: the trainer makes as many as it plays episodes at once."""

    def __init__(self) -> None:
        self._session = GenericEnvClient(base_url=ADDRESS).sync().connect()
        self.reward = 0.0

    def reset(self, **_columns: object) -> None:
        """Begin an episode."""
        self._session.reset()
        self.reward = 0.0

    def echo(self, message: str) -> str:
        """Say something, and hear it.

        Args:
            message: What to say.

        Returns:
            What was heard.
        """
        result = self._session.step({"message": message})
        self.reward = float(result.reward or 0.0)
        return str(result.observation["echoed_message"])


def reward(
    environments: Sequence[Echo],
    completions: Sequence[Sequence[Mapping[str, Any]]],
    **_columns: object,
) -> list[float]:
    """What the environment gave for the last message."""
    for environment, messages in zip(environments, completions, strict=True):
        if not environment.reward:  # no tool was called
            environment.echo(str(messages[-1].get("content") or ""))
    return [environment.reward for environment in environments]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the markers of Qwen's chat template, which TRL brings."""
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*markers, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106 (a marker, no secret)
        pad_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=["<|im_start|>"],
        chat_template=template.read_text(encoding="utf-8"),
    )


def tiny_model(tokens: int) -> PreTrainedModel:
    """A random model of some ten thousand parameters."""
    config = Qwen3Config(
        vocab_size=tokens,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    """Train, and print the gradient's norm and the mean reward of each step."""
    tokenizer = None if MODEL else tiny_tokenizer()
    trainer = trl.GRPOTrainer(
        model=MODEL or tiny_model(len(tokenizer)),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": PROMPT}]] * 8}),
        reward_funcs=reward,
        environment_factory=Echo,
        args=trl.GRPOConfig(
            output_dir="trl-out",
            max_steps=STEPS,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=256 if MODEL else 8,  # of 8 bytes `echo` rewards each
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=MODEL is None,
            chat_template_kwargs={"enable_thinking": False},
        ),
    )
    trainer.train()
    for log in trainer.state.log_history:
        if "reward" in log:
            gradient, mean = float(log["grad_norm"]), float(log["reward"])
            print(f"step {log['step']}: gradient {gradient:.2f}, mean reward {mean:.2f}")


if __name__ == "__main__":
    main()
