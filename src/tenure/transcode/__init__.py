"""The media worker of the inbox contract: fetch a source, run ffmpeg on it, upload what it made.

`handler` is the story: the stages fetching, processing and uploading, each reported. `storage` and
`transfer` move bytes between object storage (or signed URLs) and a folder of this attempt alone
(`workspace`); `access` opens the job's credentials and has them refreshed when storage refuses
them; `ffmpeg` builds and reads the program, and `confine` is the cage in which it runs: no network,
no other files, processes or rights, and limits on memory, time and file size. Outputs go to a
key that holds the claim's version; they count only when the fenced settlement has published them.
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
