//! `ibv_devinfo` and sysfs show what the table of a device says.
#![expect(clippy::unwrap_used, reason = "a test")]

mod built_libraries;

use std::env;
use std::fs;
use std::process::Command;

use anyverbs_testing::skip;

const RACK: &str = "
[[devices]]
name = 'rail0'
guid = '0002:c903:00aa:bbcc'
mtu = 2048
limits = { max_qp = 100, max_cqe = 4096, max_sge = 12, max_qp_rd_atom = 16, max_srq = 7 }

[[devices]]
name = 'rail1'
";

#[test]
fn the_guid_the_mtu_and_the_limits_of_a_table_are_shown() {
    let dir = env::temp_dir().join(format!("anyverbs-topology-{}", std::process::id()));
    built_libraries::link(&dir.join("lib"));
    fs::write(dir.join("rack.toml"), RACK).unwrap();
    let prints = |script: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
        command.args(["run", "--", "sh", "-c", script]).current_dir(&dir);
        command.env("ANYVERBS_LIB_DIR", dir.join("lib")).env("ANYVERBS_CONFIG", "rack.toml");
        command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let guids = prints(
        "cat /sys/class/infiniband/rail0/node_guid /sys/class/infiniband/rail0/sys_image_guid",
    );
    assert_eq!(guids, "0002:c903:00aa:bbcc\n0002:c903:00aa:bbcc\n");
    let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
    command.args(["devices", "--json"]).current_dir(&dir).env("ANYVERBS_CONFIG", "rack.toml");
    let listed: serde_json::Value =
        serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    for name in ["node_guid", "sys_image_guid"] {
        assert_eq!(listed[0][name], "0002:c903:00aa:bbcc", "{listed}");
    }
    for (rail, max_qp, max_srq, mtu) in [(0, 100, 7, 2048), (1, 16_384, 16_384, 4096)] {
        let (limits, port) = (&listed[rail]["limits"], &listed[rail]["port"]);
        assert_eq!((&limits["max_qp"], &limits["max_srq"]), (&max_qp.into(), &max_srq.into()));
        assert_eq!(limits.as_object().unwrap().len(), 17, "{limits}");
        assert_eq!(port["max_mtu"], mtu);
    }
    let is_there = Command::new("sh").args(["-c", "command -v ibv_devinfo"]).output().unwrap();
    if !is_there.status.success() {
        fs::remove_dir_all(&dir).unwrap();
        return skip("no ibv_devinfo (ibverbs-utils)");
    }
    let value = |shown: &str, name: &str| {
        let line = shown.lines().find_map(|line| line.trim().strip_prefix(name));
        line.unwrap_or_else(|| panic!("no {name} in {shown}")).trim().to_owned()
    };
    let [own, other] = ["rail0", "rail1"].map(|rail| prints(&format!("ibv_devinfo -v -d {rail}")));
    for (name, of_own, of_other) in [
        ("max_qp:", "100", "16384"),
        ("max_cqe:", "4096", "1048576"),
        ("max_sge:", "12", "32"),
        ("max_sge_rd:", "12", "32"),
        ("max_qp_rd_atom:", "16", "128"),
        ("max_srq:", "7", "16384"),
        ("max_mtu:", "2048 (4)", "4096 (5)"),
        ("active_mtu:", "2048 (4)", "4096 (5)"),
    ] {
        assert_eq!(
            (value(&own, name), value(&other, name)),
            (of_own.into(), of_other.into()),
            "{name}"
        );
    }
    assert_eq!(value(&own, "node_guid:"), "0002:c903:00aa:bbcc");
    assert_eq!(value(&own, "sys_image_guid:"), "0002:c903:00aa:bbcc");
    assert_ne!(value(&other, "node_guid:"), "0002:c903:00aa:bbcc");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn tables_that_an_option_replaces_are_told() {
    let dir = env::temp_dir().join(format!("anyverbs-replaced-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let file = dir.join("two.toml");
    fs::write(&file, RACK).unwrap();
    let said = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
        command.args(words).arg("--config").arg(&file).args(["--devices", "2"]);
        let output = command.output().unwrap();
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let what = format!(
        "ANYVERBS_DEVICES=\"2\" replaces the devices of configuration file {file:?}, 2 of them with a table: "
    );
    let (devices, warning) = said(&["devices"]);
    assert!(devices.contains("anyverbs1\n") && !devices.contains("rail1"), "{devices}");
    assert!(warning.starts_with(&format!("anyverbs: {what}")), "{warning}");
    let (findings, _) = said(&["doctor"]);
    assert!(findings.contains(&format!("note  {what}")), "{findings}");
    fs::remove_dir_all(&dir).unwrap();
}
