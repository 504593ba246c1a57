# SPDX-License-Identifier: Apache-2.0
"""The HTTP router: sends each request to the worker that has most of its prompt and least to do.

It needs the extra ``[router]``; nothing here imports an engine. What it decides is in
:mod:`mimo_plugin.core.routing`.
"""
