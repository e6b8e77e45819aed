# The host probe: one POSIX sh script, one round trip. Reads only, never fails, exits 0.
#
# Prints sections ("@@ NAME", then lines as the kernel or the tool wrote them, "@@ end" last) for
# edgellm/parse.py to read: this script collects, parse.py understands. What is absent prints
# nothing. Works under dash, busybox and bash, as root and as a plain user.
# Each fork costs about 1 ms on a small board: sysfs is read by one grep over many files.
LC_ALL=C
# systemd's own default first: what a service would find, not what this login shell would.
PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH"
export LC_ALL PATH

section() { printf '@@ %s\n' "$1"; }
have() { command -v "$1" >/dev/null 2>&1; }

# CPU and memory nodes that this shell may use, for trying numactl: it refuses any other.
first_cpu=0
nodes=0
while read -r key value; do
  case $key in
    Cpus_allowed_list:) first_cpu=${value%%[,-]*} ;;
    Mems_allowed_list:) nodes=$value ;;
  esac
done </proc/self/status

# Where systemd's tree of services begins: the parent of pid 1's /init.scope. From there up to the
# root, the files that bound every service. Deepest first: parse.py takes the nearest.
cgroup_files() {
  set --
  while IFS=: read -r _ names path; do
    case ",$names," in
      ,,) mount=/sys/fs/cgroup ;;
      *,cpu,*) mount=/sys/fs/cgroup/cpu ;;
      *,cpuset,*) mount=/sys/fs/cgroup/cpuset ;;
      *,memory,*) mount=/sys/fs/cgroup/memory ;;
      *) continue ;;
    esac
    path=${path%/init.scope}
    path=${path%/}
    case $path in *..*) path= ;; esac
    while :; do
      dir=$mount$path
      set -- "$@" "$dir/cgroup.controllers" "$dir/cpuset.cpus.effective" "$dir/cpu.max" \
        "$dir/memory.max" "$dir/cpuset.effective_cpus" "$dir/cpu.cfs_quota_us" \
        "$dir/cpu.cfs_period_us" "$dir/memory.limit_in_bytes"
      [ -n "$path" ] || break
      path=${path%/*}
    done
  done </proc/1/cgroup
  [ $# -eq 0 ] || grep -Hs '' "$@"
}

probe() {
  section format
  echo 1
  section time
  date +%s
  section uname
  uname -mr
  section os-release
  cat /etc/os-release || cat /usr/lib/os-release
  section long_bit
  getconf LONG_BIT
  section page_size
  getconf PAGESIZE || awk '/^KernelPageSize/ { print $2 * 1024; exit }' /proc/self/smaps
  section device_tree_model
  [ -r /proc/device-tree/model ] && { cat /proc/device-tree/model; echo; }
  section virt
  if have systemd-detect-virt; then systemd-detect-virt
  elif [ -e /.dockerenv ]; then echo docker
  elif [ -r /run/systemd/container ]; then cat /run/systemd/container
  fi

  section sysfs
  grep -Hs '' \
    /sys/devices/system/cpu/online \
    /sys/devices/system/cpu/isolated \
    /sys/devices/system/cpu/cpu[0-9]*/cpu_capacity \
    /sys/devices/system/cpu/cpu[0-9]*/cpufreq/cpuinfo_max_freq \
    /sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list \
    /sys/devices/system/cpu/cpufreq/policy[0-9]*/scaling_governor \
    /sys/devices/system/cpu/cpufreq/policy[0-9]*/scaling_available_governors \
    /sys/devices/cpu_core/cpus /sys/devices/cpu_atom/cpus \
    /sys/devices/system/node/node[0-9]*/cpulist \
    /sys/block/zram*/disksize /sys/block/zram*/comp_algorithm \
    /sys/class/dmi/id/sys_vendor /sys/class/dmi/id/product_name \
    /sys/class/thermal/thermal_zone*/temp \
    /sys/devices/platform/soc/soc:firmware/get_throttled \
    /sys/fs/selinux/enforce \
    /proc/sys/kernel/sched_rt_runtime_us \
    /proc/sys/vm/swappiness
  section node_meminfo
  grep -s MemTotal /sys/devices/system/node/node[0-9]*/meminfo
  section cpuinfo
  # The flags once, and the core type of each CPU.
  awk -F ': *' '
    /^processor/ { cpu = $2 }
    /^(flags|Features)/ && !seen { seen = 1; print "flags", $2 }
    /^CPU implementer/ { implementer = $2 }
    /^CPU part/ { print "core", cpu, implementer, $2 }
  ' /proc/cpuinfo
  section meminfo
  grep -E '^(MemTotal|MemFree|MemAvailable|Cached):' /proc/meminfo
  section swaps
  cat /proc/swaps

  section cgroup
  cgroup_files
  section pid1_cpus
  grep -E '^(Cpus|Mems)_allowed_list' /proc/1/status
  section psi
  [ -e /proc/pressure/cpu ] && echo yes
  section zram_module
  if [ -d /sys/module/zram ] || [ -d /sys/class/zram-control ]; then echo loaded
  else
    release=$(uname -r)
    grep -hs -m 1 -o '[^ :]*/zram\.ko[.a-z]*' \
      "/lib/modules/$release/modules.builtin" "/lib/modules/$release/modules.dep"
  fi
  section zram_managers
  for file in \
    /usr/lib/systemd/system-generators/zram-generator \
    /lib/systemd/system-generators/zram-generator \
    /etc/systemd/zram-generator.conf /run/systemd/zram-generator.conf \
    /usr/local/lib/systemd/zram-generator.conf /usr/lib/systemd/zram-generator.conf \
    /etc/systemd/zram-generator.conf.d/*.conf /run/systemd/zram-generator.conf.d/*.conf \
    /usr/lib/systemd/zram-generator.conf.d/*.conf \
    /etc/systemd/system/edgellm-zram.service \
    /usr/lib/systemd/system-generators/rpi-swap-generator \
    /lib/systemd/system-generators/rpi-swap-generator \
    /lib/systemd/system/zramswap.service /usr/lib/systemd/system/zramswap.service \
    /lib/systemd/system/zram-config.service /usr/lib/systemd/system/zram-config.service \
    /lib/systemd/system/armbian-zram-config.service \
    /usr/lib/systemd/system/armbian-zram-config.service \
    /etc/systemd/system/nvzramconfig.service /lib/systemd/system/nvzramconfig.service
  do
    [ -s "$file" ] && echo "$file"
  done

  section tools
  have python3 &&
    python3 -I -S -c 'import sys; print("python3 %d.%d.%d" % sys.version_info[:3])'
  [ -d /run/systemd/system ] && have systemctl && systemctl --version | head -n 1
  have chrt && echo chrt && chrt -f 1 true && echo realtime_works
  for name in irqbalance power-profiles-daemon; do
    # What runs has a cgroup: v2, v1 and hybrid
    for root in /sys/fs/cgroup /sys/fs/cgroup/systemd; do
      [ -d "$root/system.slice/$name.service" ] && echo "$name" && break
    done
  done
  for manager in apt-get dnf; do have "$manager" && echo "$manager"; done
  if have numactl; then
    echo numactl
    set -- "--physcpubind=$first_cpu"
    case $nodes in *[,-]*) set -- "$@" "--membind=$nodes" ;; esac
    numactl "$@" true && echo numactl_works
  fi
  section libraries
  { have ldconfig && ldconfig -p || ls -d /usr/lib*/lib*.so.* /usr/lib/*/lib*.so.*; } |
    grep -E '/(libgomp\.so\.1|libstdc\+\+\.so\.6)$'
  section sysctl_swappiness
  # A file hides those of its name in the directories after its own, as does a link to /dev/null
  set --
  names=' '
  for file in /etc/sysctl.d/*.conf /run/sysctl.d/*.conf /usr/local/lib/sysctl.d/*.conf \
    /usr/lib/sysctl.d/*.conf; do
    [ -e "$file" ] || continue
    case $names in *" ${file##*/} "*) continue ;; esac
    names="$names${file##*/} "
    set -- "$@" "$file"
  done
  [ $# -gt 0 ] && grep -Hs '^[ -]*vm[./]swappiness' "$@"
  section tuned
  [ -e /run/tuned/tuned.pid ] && cat /etc/tuned/active_profile
  section throttled
  have vcgencmd && vcgencmd get_throttled

  section disk
  dir=/opt/edgellm
  while [ ! -d "$dir" ]; do dir=${dir%/*}; dir=${dir:-/}; done
  disk=$(df -Pk "$dir" | tail -n 1)
  printf '%s\n' "$disk"
  section mounts
  awk -v disk="${disk##* }" \
    '$2 == disk || $3 ~ /^cgroup2?$/ || $1 ~ /^\/dev\/zram/' /proc/mounts
  section service_user
  user=$(id -u edgellm) && echo "$user"
  section own_memory
  # What an edgellm that runs already holds: the plan must not see less memory for its own sake.
  [ -n "$user" ] && grep -Hs -E '^(Uid|VmRSS|RssAnon|VmLck):' /proc/[0-9]*/status |
    awk -v user="$user" '
      { split($1, at, ":"); name = at[2] }
      name == "Uid" { mine = ($2 == user); locked = 0 }
      mine && name == "VmLck" { locked = $2 }
      mine && name == "VmRSS" { rss = $2 }
      mine && name == "RssAnon" { held += locked > 0 ? rss : $2 }
      END { if (held) print held }'
  section recorded
  # A file cut short has no newline at its end, and must not take the next section with it
  [ -r /opt/edgellm/recorded.json ] && { cat /opt/edgellm/recorded.json; echo; }
  section measured
  [ -r /opt/edgellm/measured.json ] && { cat /opt/edgellm/measured.json; echo; }
  section end
}

# One encoding for all: printable ASCII, so that no host can break the reader.
probe 2>/dev/null | tr -cd '\011\012\040-\176'
true
