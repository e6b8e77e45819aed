# argv[1]: JSON {release, unit_dir, units, drop_ins, drop_in, mark}. Compares what of ours is
# installed in unit_dir with what the release has: the units by their names, and
# <drop_ins>/<unit>.conf with <unit>.d/<drop_in>. Prints {"differing": [[source, place]],
# "surplus": [places that the release has nothing for]}.
import glob
import json
import os
import sys

asked = json.loads(sys.argv[1])


def content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


wanted = {
    os.path.join(asked["unit_dir"], unit): os.path.join(asked["release"], unit)
    for unit in asked["units"]
    if os.path.exists(os.path.join(asked["release"], unit))
}
for source in glob.glob(os.path.join(glob.escape(asked["release"]), asked["drop_ins"], "*.conf")):
    unit = os.path.basename(source)[: -len(".conf")]
    wanted[os.path.join(asked["unit_dir"], unit + ".d", asked["drop_in"])] = source
installed = [os.path.join(asked["unit_dir"], unit) for unit in asked["units"]]
installed += [
    place
    for place in glob.glob(
        os.path.join(glob.escape(asked["unit_dir"]), "*.service.d", asked["drop_in"])
    )
    if (content(place) or b"").startswith(asked["mark"].encode())
]
print(
    json.dumps(
        {
            "differing": sorted(
                [source, place]
                for place, source in wanted.items()
                if content(place) != content(source)
            ),
            "surplus": sorted(
                place for place in installed if place not in wanted and os.path.lexists(place)
            ),
        }
    )
)
