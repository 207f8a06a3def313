"""The model that a server serves: what the API knows of it, from the settings, the engines and the tokenizer."""

from __future__ import annotations

import hashlib
import time

from moestro import __version__
from moestro.config.serve_settings import ServeSettings
from moestro.core.request import ModelInfo
from moestro.server.api.request_builder import ServedModel
from moestro.text.chats.chat_format import chat_format
from moestro.text.tokenizer import Tokenizer


def served_model(settings: ServeSettings, tokenizer: Tokenizer, info: ModelInfo) -> ServedModel:
    """Return the served model.

    Args:
        info: What the first engine says of its model.
    """
    server, chat = settings.server, settings.chat
    return ServedModel(
        names=server.served_model_name,
        created=int(time.time()),
        fingerprint=_fingerprint(settings, info),
        info=info,
        tokenizer=tokenizer,
        has_priorities=settings.scheduler.scheduling_policy == "priority",
        resumes_streams=settings.processes.resume_streams,
        has_strict_fields=server.strict_fields,
        forces_usage=server.enable_force_include_usage,
        users_are_clients=server.users_are_clients,
        is_traced=settings.tracing.url is not None,
        shows_tokenizer=server.enable_tokenizer_info_endpoint,
        max_choices_at_once=_choices_at_once(settings),
        chat=chat_format(chat, tokenizer.chat_template, tokenizer.special_texts),
    )


def _choices_at_once(settings: ServeSettings) -> int:
    """Return the choices of one request that engines have at once: half of the sequences that they run."""
    return max(1, settings.num_engines * settings.scheduler.max_num_seqs // 2)


def _fingerprint(settings: ServeSettings, info: ModelInfo) -> str:
    """Return a name that differs where answers may differ. The name of a paced server contains `paced`."""
    parts = (__version__, str(settings.model), str(settings.paced), str(settings.chat), info.dtype, info.device)
    kind = "fp_" if settings.paced is None else "fp_paced_"
    return kind + hashlib.blake2b("\0".join(parts).encode(), digest_size=5).hexdigest()
