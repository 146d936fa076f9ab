"""The media worker of the inbox contract: fetch a source, run ffmpeg on it, upload the outputs.

`handler` runs an attempt: it fetches, processes and uploads, and reports each stage. `storage`
opens the job's credentials and moves bytes between object storage (or signed URLs) and the
attempt's folder. `ffmpeg` builds the command lines. `cage` runs them through `confine`, without
network, other files or rights, and with limits on memory, time and file size. The storage key of an
output contains the claim's version. Outputs count only once the fenced settle has published them.
"""

from tenure.core.transcode import Output, Place, Transcode
from tenure.transcode.handler import Transcoder, transcode_handler
from tenure.transcode.storage import TranscodeSettings

__all__ = [
    "Output",
    "Place",
    "Transcode",
    "TranscodeSettings",
    "Transcoder",
    "transcode_handler",
]
