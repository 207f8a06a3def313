"""`fake_server.py`, where a chat template has half of the time that it has otherwise: tests wait for it, on a full CPU.

Its rendering processes run this file too; their first argument is RENDERER.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from moestro.text.chats import chat_template
from moestro.text.chats.chat_template import TIME_LIMIT_S

RENDERER = "moestro.text.chats.template_worker"  # by which tests know such a process
LIMIT_S = TIME_LIMIT_S / 2

if __name__ == "__main__":
    from replaced import replace_names

    if RENDERER in sys.argv:
        from moestro.text.chats import template_worker

        replace_names(template_worker, TIME_LIMIT_S=LIMIT_S)
        template_worker.main()
    else:
        replace_names(chat_template, TIME_LIMIT_S=LIMIT_S, _COMMAND=(sys.executable, __file__, RENDERER))
        runpy.run_path(str(Path(__file__).with_name("fake_server.py")), run_name="__main__")
