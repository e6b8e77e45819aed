# argv[1]: JSON {"models": {path: sha256}, "runtimes": {directory: id}}. Tells which of them are
# whole: untouched since their digest had been checked, or since they had run, and without rot.
import json
import sys

from edgellm.remote.wholeness import model_is_whole, runtime_is_whole, step_back

step_back()
wanted = json.loads(sys.argv[1])
states = {path: model_is_whole(path, sha256) for path, sha256 in wanted["models"].items()}
states.update({path: runtime_is_whole(path, rid) for path, rid in wanted["runtimes"].items()})
print(json.dumps(states))
