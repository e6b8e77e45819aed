"""Which of a machine's apt sources go into the hosts' image: the distribution's own, no others."""

from demo.image import Suite, own_sources

BOOKWORM = Suite("debian", "bookworm", "amd64")
JAMMY = Suite("ubuntu", "jammy", "amd64")

# As installed on Debian 12, with the mirrors' names replaced.
DEBIAN_SOURCES = """\
Types: deb deb-src
# the mirror below is the nearest
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main non-free-firmware
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


def test_deb822_entries_keep_their_mirror_and_lose_source_packages_and_backports() -> None:
    assert own_sources({"/etc/apt/sources.list.d/debian.sources": DEBIAN_SOURCES}, BOOKWORM) == (
        "Types: deb\n"
        "URIs: http://mirror.example/debian\n"
        "Suites: bookworm bookworm-updates\n"
        "Components: main non-free-firmware\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        "\n"
        "Types: deb\n"
        "URIs: http://mirror.example/debian-security\n"
        "Suites: bookworm-security\n"
        "Components: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )


def test_one_line_entries_of_an_older_ubuntu_are_understood() -> None:
    text = (
        "# See the manual for how to upgrade\n"
        "deb http://mirror.example/ubuntu/ jammy main restricted universe\n"
        "# deb-src http://mirror.example/ubuntu/ jammy main\n"
        "deb http://mirror.example/ubuntu/ jammy-backports main universe\n"
        "deb [arch=amd64 signed-by=/usr/share/keyrings/ubuntu-archive-keyring.gpg] "
        "http://mirror.example/ubuntu/ jammy-security main # keep\n"
    )
    assert own_sources({"/etc/apt/sources.list": text}, JAMMY) == (
        "Types: deb\n"
        "URIs: http://mirror.example/ubuntu/\n"
        "Suites: jammy\n"
        "Components: main restricted universe\n"
        "\n"
        "Types: deb\n"
        "URIs: http://mirror.example/ubuntu/\n"
        "Suites: jammy-security\n"
        "Components: main\n"
        "Architectures: amd64\n"
        "Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n"
    )


def test_third_party_entries_stay_out() -> None:
    files = {
        "a.list": "deb https://packages.example/sdk sdk-bookworm main\n",
        "b.list": "deb [signed-by=/etc/apt/keyrings/b.asc] https://b.example bookworm main\n",
        "c.sources": "Types: deb\nURIs: https://c.example\nSuites: bookworm\nComponents: stable\n",
        "d.sources": DEBIAN_SOURCES.replace("Types:", "Enabled: no\nTypes:"),
    }
    assert own_sources(files, BOOKWORM) == ""
