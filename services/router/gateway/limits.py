"""What the gateway bears from one client: owns its numbers."""

from __future__ import annotations

from msgspec import Struct

from shared.multimodal.image import ImageLimits


class GatewayLimits(Struct, frozen=True):
    """Bytes unless a name says otherwise. ``stall_s``: how long a client may leave its stream unread."""

    max_connections: int = 4096
    header_timeout_s: float = 10.0
    max_body: int = 32 << 20
    body_timeout_s: float = 30.0
    stall_s: float = 60.0
    images: ImageLimits = ImageLimits()
