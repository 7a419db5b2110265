# SPDX-License-Identifier: Apache-2.0
from .sdk import AsyncClient as AsyncClient
from .sdk import Client as Client

__version__: str
