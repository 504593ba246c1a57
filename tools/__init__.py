# SPDX-License-Identifier: Apache-2.0
"""Development tools of the project: set-up, tiny model, servers, workloads, test tiers."""
