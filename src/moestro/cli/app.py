"""The `moestro` command, and the sources of settings that its verbs share."""

from __future__ import annotations

from cyclopts import App, Parameter
from cyclopts.config import Env

from moestro import __version__
from moestro.config.config_sources import ConfigFile, Origins

ORIGINS = Origins()

app = App(
    name="moestro",
    help=(
        "One scheduler for Mixture-of-Experts serving, from the cluster down to the expert.\n\n"
        "Every flag can also be set by an environment variable: --max-num-seqs by MOESTRO_MAX_NUM_SEQS."
    ),
    version=__version__,
    config=(
        Env("MOESTRO_", command=False),  # keeps API keys out of the process list
        ConfigFile(),
        ORIGINS,
    ),
    default_parameter=Parameter(show_env_var=False, negative_iterable=()),
)
