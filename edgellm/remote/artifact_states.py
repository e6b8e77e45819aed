# argv[1]: JSON {"models": {path: sha256}, "runtimes": {directory: id}}. Tells which of them are
# whole without reading them: by the manifest that was written when the digest had been checked, or
# the runtime had run. What was touched, or opened to others, since then is not whole.
import json
import os
import sys

from edgellm.remote.wholeness import fingerprint, model_is_whole


def runtime_is_whole(directory: str, runtime_id: str) -> bool:
    try:
        with open(os.path.join(directory, ".complete")) as file:
            return file.read().split() == [runtime_id, fingerprint(directory)]
    except OSError:
        return False


wanted = json.loads(sys.argv[1])
states = {path: model_is_whole(path, sha256) for path, sha256 in wanted["models"].items()}
states.update({path: runtime_is_whole(path, rid) for path, rid in wanted["runtimes"].items()})
print(json.dumps(states))
