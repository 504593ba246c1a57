# SPDX-License-Identifier: Apache-2.0
"""`make run`: one workload on stock vLLM and on vLLM with the plugin, compared answer by answer.

    python -m tools.run                     # tiny MiMo, fp32, about five minutes on two cores
    python -m tools.run --model PATH        # any model on the installed engine

Modules: ``text`` (messages as tokens in the model's chat format), ``workload`` (sessions and
their order), ``replay`` (closed-loop client), ``compare`` (arithmetic and claims), ``drafts`` (the
same for speculation, on the trained tiny checkpoint), ``page`` and ``drafts_page`` (HTML).
"""
