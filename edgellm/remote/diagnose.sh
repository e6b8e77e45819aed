# What a bug report needs of a host: one POSIX sh script, one round trip. Reads only, needs nothing
# of ours, exits 0. Its first line is set before it is sent: mark=<random>.
#
# Prints sections: "<mark> NAME", then lines; what could not be read is a line "<mark>? WHY" in it.
# Each has a bound, and so has the whole. What lies in our key files is taken out of every line
# before it leaves the host; edgellm/redaction.py takes out the rest of what is nobody's business.
LC_ALL=C
PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH"
export LC_ALL PATH

have() { command -v "$1" >/dev/null 2>&1; }
missing() { printf '%s? %s\n' "$mark" "$1"; }
within() { # SECONDS COMMAND...
  seconds=$1
  shift
  if have timeout; then timeout "$seconds" "$@"; else "$@"; fi 2>&1
}
section() { # NAME BYTES COMMAND...: the last bytes where there are more
  printf '\n%s %s\n' "$mark" "$1"
  bytes=$2
  shift 2
  "$@" 2>&1 | tail -c "$bytes"
}
each() { # FILE...: those that can be read, with their names
  found=
  for file in "$@"; do
    [ -r "$file" ] || continue
    found=1
    printf '==> %s\n' "$file"
    cat "$file"
    echo
  done
  [ -n "$found" ] || missing "none of them is there, or may be read: $*"
}

group=
pids=
if have systemctl; then
  group=$(within 10 systemctl show edgellm.service --property=ControlGroup --value)
fi
case $group in
  /*)
    for root in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
      [ -r "$root$group/cgroup.procs" ] && pids="$pids $(tr '\n' ' ' <"$root$group/cgroup.procs")"
    done
    pids=$(echo "$pids" | tr ' ' '\n' | sort -un | head -n 64)
    ;;
esac

units() {
  have systemctl || { missing "no systemctl"; return; }
  within 10 systemctl cat --no-pager edgellm.service edgellm.socket edgellm.slice
  within 10 systemctl show --no-pager edgellm.service edgellm.socket edgellm.slice \
    --property=Id,ActiveState,SubState,Result,MainPID,NRestarts,ExecMainStatus,ExecMainCode \
    --property=ControlGroup,DropInPaths,AllowedCPUs,CPUWeight,MemoryCurrent,MemoryPeak,OOMPolicy
}
journal() {
  have journalctl || { missing "no journalctl"; return; }
  within 20 journalctl --no-pager --output=short-iso --lines=600 --unit=edgellm.service \
    --unit=edgellm.socket || missing "journalctl failed"
}
installed() {
  [ -d /opt/edgellm ] || { missing "nothing of ours in /opt/edgellm"; return; }
  ls -la /opt/edgellm /opt/edgellm/releases /opt/edgellm/models /opt/edgellm/runtimes
  each /opt/edgellm/current/entrypoint.sh /opt/edgellm/current/server.env \
    /opt/edgellm/recorded.json /opt/edgellm/measured.json
}
threads() {
  [ -n "$pids" ] || { missing "the service has no process"; return; }
  for pid in $pids; do
    for task in "/proc/$pid/task/"*; do
      [ -r "$task/stat" ] || continue
      printf 'stat %s %s\n' "$pid" "$(cat "$task/stat")"
      printf 'cpus %s %s\n' "${task##*/}" "$(grep Cpus_allowed_list "$task/status")"
      printf 'schedstat %s %s\n' "${task##*/}" "$(cat "$task/schedstat")"
    done
  done
}
memory() {
  cat /proc/meminfo /proc/swaps
  for pid in $pids; do each "/proc/$pid/smaps_rollup" "/proc/$pid/limits"; done
}
numa() {
  each /sys/devices/system/node/node[0-9]*/numastat
  if have numastat; then
    for pid in $pids; do within 10 numastat -p "$pid"; done
  else missing "no numastat"; fi
}
load() {
  cat /proc/loadavg
  grep '^cpu' /proc/stat
  each /proc/pressure/cpu /proc/pressure/memory /proc/pressure/io
  case $group in
    /*) each "/sys/fs/cgroup$group/cpu.pressure" "/sys/fs/cgroup$group/cpu.stat" \
      "/sys/fs/cgroup$group/memory.events" ;;
  esac
}
heat() {
  each /sys/class/thermal/thermal_zone[0-9]*/temp /sys/class/thermal/cooling_device[0-9]*/cur_state \
    /sys/devices/system/cpu/cpufreq/policy[0-9]*/scaling_cur_freq \
    /sys/devices/system/cpu/cpufreq/policy[0-9]*/scaling_governor \
    /sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count \
    /sys/devices/platform/soc/soc:firmware/get_throttled
}
kernel_log() {
  hints='out of memory|oom|killed process|throttl|thermal|under.?voltage|illegal|invalid opcode'
  hints="$hints|segfault|general protection|i/o error|hung task|soft lockup"
  if said=$(dmesg 2>/dev/null) && [ -n "$said" ]; then :
  elif have journalctl && said=$(within 10 journalctl --no-pager -k -n 5000) && [ -n "$said" ]
  then :
  else missing "the kernel's log may not be read"; return
  fi
  printf '%s\n' "$said" | grep -iE "$hints" | tail -n 200
}
listening() {
  if have ss; then within 10 ss -ltn; else each /proc/net/tcp; fi
}
python_is() {
  have python3 || { missing "no python3"; return; }
  within 10 python3 -V
}

all() {
  section units 60000 units
  section journal 250000 journal
  section installed 60000 installed
  section python 2000 python_is
  section threads 250000 threads
  section schedstat 60000 each /proc/schedstat
  section memory 60000 memory
  section numastat 30000 numa
  section vmstat 30000 each /proc/vmstat
  section load 30000 load
  section heat 20000 heat
  section kernel_log 60000 kernel_log
  section listening 10000 listening
  printf '\n%s end\n' "$mark"
}

if have awk; then
  all | awk '
    BEGIN {
      split("/etc/edgellm/api_keys /etc/edgellm/probe.key /etc/edgellm/upstream.key", files, " ")
      for (i = 1; i <= 3; i++)
        while ((getline line < files[i]) > 0) if (length(line) >= 8) secret[++n] = line
    }
    {
      for (i = 1; i <= n; i++)
        while ((at = index($0, secret[i])) > 0)
          $0 = substr($0, 1, at - 1) "<removed>" substr($0, at + length(secret[i]))
      print
    }' | tr -c '\11\12\40-\176' '?'
else
  printf '%s end\n%s? no awk, which takes keys out of what leaves the host\n' "$mark" "$mark"
fi
exit 0
