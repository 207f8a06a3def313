"""The `moestro` command, and the sources of settings that its verbs share."""

from __future__ import annotations

from cyclopts import App, Parameter
from cyclopts.config import Env

from moestro import __version__
from moestro.config.config_sources import ConfigFile, Origins
from moestro.config.flag_values import SuffixedNumbers, VllmValues

ORIGINS = Origins()

app = App(
    name="moestro",
    help=(
        "One scheduler for Mixture-of-Experts serving, from the cluster down to the expert.\n\n"
        "Every flag can also be set by an environment variable: --max-num-seqs by MOESTRO_MAX_NUM_SEQS. "
        "Whole numbers may have a suffix, as in vLLM: 8k is 8,000, and 8K is 8,192."
    ),
    version=__version__,
    config=(
        Env("MOESTRO_", command=False),  # keeps API keys out of the process list
        ConfigFile(),
        SuffixedNumbers(),
        VllmValues(),
        ORIGINS,
    ),
    # A flag that is given twice takes the last value, as in other programs; a flag of several values takes them all.
    default_parameter=Parameter(show_env_var=False, negative_iterable=(), allow_repeating=True),
)
