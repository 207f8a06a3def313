"""`moestro serve`: the engines and the API server."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moestro.cli.app import ORIGINS, app
from moestro.cli.extras import require_extra
from moestro.config.config_sources import config_lines
from moestro.config.serve_flags import CONFIG_GROUP, NETWORK_GROUP, ServeFlags
from moestro.config.serve_settings import (
    PACED_NETWORK,
    ModelSettings,
    PacedSettings,
    SchedulerLimits,
    ServerSettings,
    ServeSettings,
    SteppingSettings,
    kv_events_from,
)
from moestro.errors import ConfigError


@app.command
def serve(
    model: Annotated[str | None, Parameter(group=NETWORK_GROUP)] = None,
    *,
    flags: ServeFlags = ServeFlags(),
    config: Annotated[Path | None, Parameter(group=CONFIG_GROUP)] = None,
    print_config: Annotated[bool, Parameter(group=CONFIG_GROUP, negative=())] = False,
) -> None:
    """Serve a model behind OpenAI's API.

    Parameters
    ----------
    model
        A checkpoint directory, or a name on the Hugging Face hub. Unset: the small demo model that comes with Moestro.
    config
        A YAML or TOML file of settings, named as the flags are. Flags win over the environment, and both over the file.
    print_config
        Show every setting and where it came from, in a form that --config reads, and exit.
    """
    if print_config:
        print("\n".join(config_lines({"model": model} | asdict(flags), ORIGINS)))
        return
    # A paced device without arithmetic computes nothing, so a tokenizer is enough.
    require_extra("tokenizer" if flags.network.paced_arithmetic == "none" else "serve", "moestro serve")
    from moestro.server.checkpoint import DEMO_NAME, locate_model
    from moestro.server.server import serve as run

    network, front, engines = asdict(flags.network), asdict(flags.server), asdict(flags.engines)
    memory = {name: value for name, value in asdict(flags.memory).items() if value is not None}
    arithmetic, paced, device = network.pop("paced_arithmetic"), None, flags.network.device
    front["tokenizer"] = tokenizer = network.pop("tokenizer")
    if device.startswith("paced:"):
        if "kv_offloading_size" in memory:
            raise ConfigError("--kv-offloading-size does not go with a paced device, which plays no host memory")
        paced = PacedSettings(
            device=device,
            network=model or PACED_NETWORK,
            arithmetic=arithmetic,
            tokenizer=None if tokenizer is None else str(tokenizer),
            kv_cache_memory_bytes=memory.get("kv_cache_memory_bytes"),
        )
        model, network["device"] = None, "cpu"
    elif arithmetic == "none":
        raise ConfigError("--paced-arithmetic none goes with --device paced:GPU alone: no other answers without torch")
    front["served_model_name"] = flags.server.served_model_name or (paced.network if paced else model or DEMO_NAME,)
    run(
        ServeSettings(
            model=ModelSettings(model=str(locate_model(model)), **network, **memory),
            limits=SchedulerLimits(**asdict(flags.scheduling)),
            stepping=SteppingSettings(**asdict(flags.stepping)),
            kv_events=kv_events_from(engines.pop("kv_events_config")),
            server=ServerSettings(**front, **engines),
            paced=paced,
        ),
        flags.access,
    )
