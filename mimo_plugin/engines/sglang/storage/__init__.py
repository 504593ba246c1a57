# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCache over the page stores of the package."""
