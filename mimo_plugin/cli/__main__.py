# SPDX-License-Identifier: Apache-2.0
"""``python -m mimo_plugin.cli``."""

import sys

from mimo_plugin.cli.main import main

sys.exit(main())
