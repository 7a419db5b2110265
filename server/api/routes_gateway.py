# SPDX-License-Identifier: Apache-2.0
"""`/v1/gateway`: how the gateway is, and its configuration."""

from __future__ import annotations

from fastapi import APIRouter

from ...requests_db.records import Json
from .dependencies import Injected

router = APIRouter()


@router.get("/gateway")
async def gateway(deps: Injected) -> Json:
    """The gateway's address, process and environments; null where none runs."""
    return await deps.reconciler.gateway.status()


@router.get("/gateway/config")
async def gateway_config(deps: Injected) -> Json:
    """A configuration for an Envoy of the user's own, with the replicas that there are now."""
    return await deps.reconciler.gateway.standalone_config()
