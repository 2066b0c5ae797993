//! `anyverbs run --persona`: programs choose a NIC and a GID as on the hardware, and are refused what it lacks.
#![expect(clippy::unwrap_used, reason = "a test")]

mod built_libraries;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyverbs_testing::{UdpPort, skip};

/// A library directory, and a port that no other test has.
struct Scratch {
    dir: PathBuf,
    port: UdpPort,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Scratch {
    fn new() -> Self {
        let port = UdpPort::reserve();
        let name = format!("anyverbs-personas-{}-{}", std::process::id(), port.number());
        let dir = env::temp_dir().join(name);
        built_libraries::link(&dir.join("lib"));
        Self { dir, port }
    }

    fn run(&self, options: &[&str], program: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
        command.arg("run").args(options).arg("--").args(program).current_dir(&self.dir);
        command.env("ANYVERBS_LIB_DIR", self.dir.join("lib"));
        command.env("ANYVERBS_UDP_PORT", self.port.number().to_string());
        command.env("ANYVERBS_REGISTRY", format!("anyverbs-personas-{}", self.port.number()));
        let rack = Path::new("rack.toml");
        if self.dir.join(rack).exists() {
            command.env("ANYVERBS_CONFIG", rack);
        }
        command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH").output().unwrap()
    }

    /// The output of a program.
    fn prints(&self, options: &[&str], program: &[&str]) -> String {
        let output = self.run(options, program);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{options:?} {program:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The program that walks sysfs.
    fn walker(&self) -> String {
        let program = self.dir.join("walk");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/walk.c");
        let status = Command::new("cc")
            .args(["-Wall", "-Wextra", "-Werror", "-Wno-format-truncation", "-O1", "-o"])
            .arg(&program)
            .arg(source)
            .arg("-L")
            .arg(self.dir.join("lib"))
            .arg("-libverbs")
            .status();
        assert!(status.unwrap().success());
        program.to_str().unwrap().to_owned()
    }
}

fn is_there(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    found.unwrap().status.success()
}

/// NCCL takes the NICs of one such number for ports of one adapter, which share its bandwidth.
#[test]
fn each_device_is_an_adapter_of_its_own() {
    let scratch = Scratch::new();
    let show = ["sh", "-c", "cat /sys/class/infiniband/*/sys_image_guid"];
    for persona in [&["--persona", "mlx5"][..], &[]] {
        let shown = scratch.prints(&[&["--devices", "3"], persona].concat(), &show);
        let guids: std::collections::HashSet<&str> = shown.lines().collect();
        assert_eq!((guids.len(), shown.lines().count()), (3, 3), "{shown}");
        let is_vendors = |guid: &&str| guid.starts_with("b8ce:f6");
        assert_eq!(guids.iter().all(is_vendors), !persona.is_empty(), "{shown}");
    }
}

/// The index is that of the listings which the persona's file names.
#[test]
fn nics_and_gids_are_chosen_as_on_the_hardware() {
    let scratch = Scratch::new();
    let walker = scratch.walker();
    let both =
        |persona: &str| scratch.prints(&["--persona", persona, "--devices", "2"], &[&walker]);
    // One NUMA node, or as many as the host has: without a list the second device is on the last of two halves.
    let own = both("mlx5");
    let nodes: Vec<&str> = own.lines().map(|line| line.split(' ').nth(4).unwrap()).collect();
    let [first, second] = nodes[..] else { panic!("{own}") };
    let rate = "100 Gb/sec (4X EDR)";
    assert_eq!(
        own,
        format!(
            "mlx5_0 a17b:01:00.0 0x15b3:0x101d mlx5_core {first} {rate} nccl 3 mooncake 3\n\
             mlx5_1 a17b:02:00.0 0x15b3:0x101d mlx5_core {second} {rate} nccl 3 mooncake 3\n"
        )
    );
    let first_of = |persona: &str| both(persona).lines().next().unwrap().to_owned();
    for (persona, line) in [
        (
            "irdma",
            format!("irdma0 a17b:01:00.0 0x8086:0x1592 ice {first} {rate} nccl 1 mooncake 1"),
        ),
        (
            "bnxt",
            format!("bnxt_re0 a17b:01:00.0 0x14e4:0x1750 bnxt_en {first} {rate} nccl 3 mooncake 3"),
        ),
        (
            "ionic",
            format!(
                "ionic_0 a17b:01:00.0 0x1dd8:0x1002 ionic {first} 400 Gb/sec (4X NDR) nccl 1 mooncake 1"
            ),
        ),
        (
            "mana",
            format!("mana_0 a17b:01:00.0 0x1414:0x00ba mana {first} {rate} nccl 1 mooncake 1"),
        ),
        ("rxe", format!("rxe0 virtual -1 {rate} nccl 1 mooncake 1")),
    ] {
        assert_eq!(first_of(persona), line);
    }
    let plain = scratch.prints(&["--devices", "1"], &[&walker]);
    assert_eq!(plain, format!("anyverbs0 virtual -1 {rate} nccl 0 mooncake 0\n"));
}

/// A file of the configuration gives each device a persona. The program may work in another directory.
#[test]
fn a_rack_mixes_devices_of_several_vendors() {
    let scratch = Scratch::new();
    let walker = scratch.walker();
    let rack = "persona = 'rxe'\n[[devices]]\npersona = 'mlx5'\n[[devices]]\npersona = 'own.toml'\n\
                [[devices]]\nname = 'rail2'\n";
    fs::write(scratch.dir.join("rack.toml"), rack).unwrap();
    let own = "device = 'nic0'\nvendor_id = 1\nvendor_part_id = 2\nfw_ver = '3.4'\nrate = 25\n\
               [gids]\ntypes = ['RoCE v2']\nlink_local = false\n\
               [pci]\nvendor = 5\ndevice = 6\nclass = 0x020000\ndriver = 'own'\nspeed = 160\nwidth = 16\nnuma_nodes = [0]\n";
    fs::write(scratch.dir.join("own.toml"), own).unwrap();
    let walk = format!("cd / && {walker} && ibv_devices > /dev/null");
    let seen = scratch.prints(&[], &["sh", "-c", &walk]);
    let lines: Vec<&str> = seen.lines().collect();
    assert!(lines[0].starts_with("mlx5_0 a17b:01:00.0 0x15b3:0x101d mlx5_core "), "{seen}");
    assert!(lines[0].ends_with(" 100 Gb/sec (4X EDR) nccl 3 mooncake 3"), "{seen}");
    assert_eq!(
        lines[1],
        "nic1 a17b:02:00.0 0x0005:0x0006 own 0 25 Gb/sec (1X EDR) nccl 0 mooncake 0"
    );
    assert_eq!(lines[2], "rail2 virtual -1 100 Gb/sec (4X EDR) nccl 1 mooncake 1");
    assert_eq!(lines.len(), 3, "{seen}");
    fs::write(scratch.dir.join("rack.toml"), "devices = [{}, { persona = 'mlx6' }]").unwrap();
    let output = scratch.run(&[], &["true"]);
    assert_eq!(output.status.code(), Some(125));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("rack.toml\": device 2 of devices: persona=\"mlx6\": expected mlx5"),
        "{said}"
    );
}

/// UCX says its choice in its log.
#[test]
fn ucx_takes_the_gid_that_it_takes_on_the_hardware() {
    if !is_there("ucx_info") {
        return skip("no ucx_info");
    }
    let scratch = Scratch::new();
    for (persona, index) in
        [("mlx5", 3), ("irdma", 1), ("bnxt", 3), ("ionic", 1), ("mana", 1), ("rxe", 1)]
    {
        let options = ["--persona", persona, "--devices", "1"];
        let ucx = ["env", "UCX_LOG_LEVEL=debug", "UCX_TLS=rc_verbs,self", "ucx_info", "-d"];
        let said = scratch.prints(&options, &ucx);
        let device =
            scratch.prints(&options, &["sh", "-c", "ls $ANYVERBS_VIEW/sys/class/infiniband"]);
        let line = format!("{}:1 using gid_index {index}", device.trim());
        assert!(said.contains(&line), "{persona}: no {line:?} in {said}");
        assert_eq!(said.contains("/a17b:01:00.0'"), persona != "rxe", "{persona}: {said}");
    }
}

/// It sends large messages by the NIC with the highest rate, wherever that stands. Each is a device of PCI for it, with its own bandwidth.
#[test]
fn ucx_takes_the_fastest_nic_for_large_messages() {
    if !is_there("ucx_info") {
        return skip("no ucx_info");
    }
    let scratch = Scratch::new();
    for rate in [25, 200] {
        let nic = format!(
            "device = 'nic0'\nvendor_id = 1\nvendor_part_id = 2\nfw_ver = '3.4'\nrate = {rate}\n\
             [gids]\ntypes = ['RoCE v1', 'RoCE v2']\nlink_local = true\n\
             [pci]\nvendor = 5\ndevice = 6\nclass = 0x020000\ndriver = 'own'\nspeed = 160\nwidth = 16\n"
        );
        fs::write(scratch.dir.join(format!("nic{rate}.toml")), nic).unwrap();
    }
    for place in 0..3 {
        let device = |at: usize| {
            let (name, rate) = if at == place { ("fast", 200) } else { ("slow", 25) };
            format!("[[devices]]\nname = '{name}{at}'\npersona = 'nic{rate}.toml'\n")
        };
        let rack: String = (0..3).map(device).collect();
        fs::write(scratch.dir.join("rack.toml"), rack).unwrap();
        let ucx = ["env", "UCX_TLS=rc_v", "UCX_MAX_RNDV_RAILS=1", "ucx_info", "-e", "-u", "t"];
        let said = scratch.prints(&[], &ucx);
        let bulk: Vec<&str> = said.lines().filter(|line| line.contains(" rma_bw#")).collect();
        let fast = format!(":rc_verbs/fast{place}:1.");
        assert!(bulk.len() == 1 && bulk[0].contains(&fast), "{place}: {bulk:?} in {said}");
    }
}

/// The host's own devices are listed, with the same numbers.
#[test]
fn the_hosts_pci_devices_stay() {
    let scratch = Scratch::new();
    let list = "for d in /sys/bus/pci/devices/* /sys/class/pci_bus/*; do case $d in */a17b:*) ;; *) \
                echo $d $(cat $d/vendor $d/config $d/cpuaffinity 2>&1 | sum; readlink -f $d);; esac; done";
    let real = Command::new("sh").args(["-c", list]).output().unwrap();
    let seen = scratch.prints(&["--persona", "mlx5"], &["sh", "-c", list]);
    assert_eq!(seen, String::from_utf8(real.stdout).unwrap());
    let ours = scratch.prints(&["--persona", "mlx5"], &["ls", "/sys/bus/pci/devices"]);
    assert!(ours.contains("a17b:00:01.0\na17b:01:00.0\n"), "{ours}");
    let without =
        scratch.prints(&["--persona", "rxe"], &["sh", "-c", "ls /sys/bus/pci/devices || true"]);
    assert!(!without.contains("a17b"), "{without}");
}

#[test]
fn lspci_and_hwloc_show_the_nics_behind_their_bridges() {
    let scratch = Scratch::new();
    let options = ["--persona", "irdma", "--devices", "2"];
    if is_there("lspci") {
        let seen = scratch.prints(&options, &["lspci", "-n", "-d", "8086:1592"]);
        let line = |bus| format!("a17b:0{bus}:00.0 0200: 8086:1592 (rev 02)\n");
        assert_eq!(seen, line(1) + &line(2));
    } else {
        skip("no lspci (pciutils)");
    }
    if is_there("lstopo-no-graphics") {
        let show = ["lstopo-no-graphics", "--of", "console", "--whole-io"];
        let seen = scratch.prints(&options, &show);
        let lines: Vec<&str> = seen.lines().map(str::trim).collect();
        for (bus, device) in [(1, "irdma0"), (2, "irdma1")] {
            let nic = format!("PCI a17b:0{bus}:00.0 (Ethernet)");
            let below = format!("OpenFabrics \"{device}\"");
            let way = ["PCIBridge", &*nic, &*below];
            assert!(lines.windows(3).any(|part| part == way), "{seen}");
        }
    } else {
        skip("no lstopo-no-graphics (hwloc)");
    }
}

#[test]
fn a_refusal_names_the_persona() {
    let scratch = Scratch::new();
    let said = |options: &[&str], program: &[&str]| {
        let output = scratch.run(options, program);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    if is_there("ibv_srq_pingpong") {
        let said = said(&["--persona", "irdma"], &["ibv_srq_pingpong", "-g", "1"]);
        let reason =
            "persona irdma: it lacks shared receive queues (SRQ); see `anyverbs explain AV8011`";
        assert!(said.contains(reason), "{said}");
    } else {
        skip("no ibv_srq_pingpong");
    }
    let output = scratch.run(&["--persona", "connectx"], &["true"]);
    assert_eq!(output.status.code(), Some(125));
    let line = "anyverbs: --persona=\"connectx\": expected mlx5, irdma, bnxt, ionic, rxe, mana, or a file whose name ends in .toml\n";
    assert_eq!(String::from_utf8_lossy(&output.stderr), line);
}

/// The log says which index to use.
#[test]
fn an_entry_without_traffic_is_refused_with_the_index_of_one_with_it() {
    let scratch = Scratch::new();
    let walker = scratch.walker();
    let handle = |index: &str| {
        let output = scratch.run(&["--persona", "mlx5", "--devices", "1"], &[&walker, index]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (String::from_utf8(output.stdout).unwrap(), said)
    };
    for (index, reason) in [
        ("0", "is of RoCE v1, and this device speaks RoCE v2 alone; index 3 carries traffic;"),
        (
            "1",
            "is the link-local address of the hardware, which no interface here has; index 3 carries traffic;",
        ),
        (
            "2",
            "is of RoCE v1, and this device speaks RoCE v2 alone; index 3 is the same address with RoCE v2;",
        ),
    ] {
        let (ended, said) = handle(index);
        let line = format!("refused: ibv_create_ah: persona mlx5: GID index {index} {reason}");
        assert!(ended == "Operation not supported\n" && said.contains(&line), "{ended}{said}");
    }
    assert_eq!(handle("3").0, "made\n");
}

#[test]
fn a_file_is_a_persona_for_a_program_in_another_directory() {
    let scratch = Scratch::new();
    let own = "device = \"nic0\"\nvendor_id = 1\nvendor_part_id = 2\nfw_ver = \"3.4\"\nrate = 25\n\
               [gids]\ntypes = [\"RoCE v2\", \"RoCE v1\"]\nlink_local = false\norder = [\"ipv6\", \"ipv4\"]\n\
               [pci]\nvendor = 5\ndevice = 6\nclass = 0x020000\ndriver = \"own\"\nspeed = 80\nwidth = 8\n\
               numa_nodes = [0, 1]\n";
    fs::write(scratch.dir.join("own.toml"), own).unwrap();
    let options = ["--persona", "own.toml", "--devices", "3"];
    let script = "cd / && cd sys/class/infiniband && for d in *; do echo $d $(cat $d/device/numa_node $d/fw_ver $d/ports/1/gid_attrs/types/*); done; \
                  cd / && ibv_devices";
    let printed = scratch.prints(&options, &["sh", "-c", script]);
    let mut lines = printed.lines();
    for (device, node) in [("nic0", 0), ("nic1", 1), ("nic2", 0)] {
        let line = format!("{device} {node} 3.4 RoCE v2 IB/RoCE v1");
        assert_eq!(lines.next(), Some(&*line));
    }
    assert!(printed.contains("nic2"), "{printed}");
    fs::write(scratch.dir.join("own.toml"), own.replace("rate = 25", "rate = 25\nwings = 2"))
        .unwrap();
    let output = scratch.run(&options, &["true"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(125));
    assert!(
        said.starts_with("anyverbs: --persona: persona \"own.toml\": TOML parse error at line 6"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1);
}
