"""Supervised training: render conversations, train on what the assistant wrote, keep checkpoints.

The cold start of K3's recipe. Resumes exactly: the order of conversations is a function of the seed and a cursor.
"""

from __future__ import annotations

import json
from pathlib import Path

from k3rl.chat import Renderer
from k3rl.config.distill import RolloutsData
from k3rl.config.jobs import SftJob
from k3rl.data import Conversation, ConversationStream, load_conversations
from k3rl.recipes.collect import Rollouts
from k3rl.recipes.journal import Journal
from k3rl.recipes.launch import device_of, ray_cluster, renderer_of, tokenizer_folder, trainer_resources
from k3rl.trainer import SftSequence


def run_sft(job: SftJob) -> Path:
    """Returns the run's folder."""
    renderer = renderer_of(job.model)
    source = Rollouts(job.data) if isinstance(job.data, RolloutsData) else load_conversations(job.data)
    stream = ConversationStream(source, job.seed)
    device = device_of(job)
    with Journal(job, job.steps) as journal:
        if journal.done >= job.steps:
            return journal.path
        with ray_cluster(job.ray), trainer_resources(job.model, job.trainer, device, job.seed) as trainer:
            if journal.checkpoint:
                trainer.load(journal.checkpoint / "trainer")
                stream.load_state_dict(journal.read_state("stream.json"))
            for step in journal.steps():
                with journal.progress.phase("data"):
                    batch = [encode(renderer, stream.next(), job.thinking) for _ in range(job.batch_size)]
                with journal.progress.phase("train"):
                    metrics = trainer.sft_step(batch)
                loss, speed = metrics["train/loss"], metrics["train/tokens_per_s"]
                journal.record(step, metrics, f"loss {loss:.4f}  {speed:,.0f} tokens/s")
                if journal.due(step, job.checkpoint_every):
                    with journal.store.new_checkpoint(step, job.trainer.checkpoint.keep_last) as folder:
                        trainer.save(folder / "trainer", tokenizer_folder(job.model))
                        (folder / "stream.json").write_text(json.dumps(stream.state_dict()))
    return journal.path


def encode(renderer: Renderer, conversation: Conversation | SftSequence, thinking: bool) -> SftSequence:
    """A conversation as ids with loss where the assistant wrote, the format's openers included (spec/01 §4)."""
    if isinstance(conversation, SftSequence):
        return conversation
    encoded = renderer.encode_conversation(
        conversation.messages, conversation.tools, conversation.effort, thinking=thinking
    )
    return SftSequence(encoded.ids, encoded.loss_mask, 1.0)
