"""The pipe between a decoder and its child process: owns the two frame headers."""

from __future__ import annotations

import struct

#: Request: format name, number of encoded bytes, wanted width and height (0 = as it is), pixel cap.
REQUEST = struct.Struct(">4sIHHI")
#: Reply: status, width, height, number of RGB bytes.
REPLY = struct.Struct(">BHHI")
#: What the child writes once it is ready to decode.
READY = b"ready\n"

OK, INVALID, TOO_LARGE = 0, 1, 2
