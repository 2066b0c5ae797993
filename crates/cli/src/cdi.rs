//! `anyverbs cdi`: the device for containers, as the Container Device Interface (CDI) describes it.
//!
//! A container engine applies such a file when a container is started. Ours adds mounts and environment variables; there is no device
//! node. Programs of the container find the libraries by `LD_LIBRARY_PATH`. The command is there for programs that look for the device
//! in `/sys` or `/dev`: their view depends on the addresses of the container, which the engine gives it later.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::args::{Cdi, Settings};
use crate::libraries;

/// The oldest version of the specification that has all that is used here.
const VERSION: &str = "0.3.0";
/// The vendor and class of the device, which stand before its name: `--device anyverbs/rdma=anyverbs0`.
const KIND: &str = "anyverbs/rdma";
/// The device's name where no setting gives it another.
const DEVICE: &str = "anyverbs0";
/// The places in the container.
const LIBRARIES: &str = "/usr/local/lib/anyverbs";
const COMMAND: &str = "/usr/local/bin/anyverbs";
const CONFIG: &str = "/etc/anyverbs.toml";

/// Prints the specification, or writes it to a file.
pub(crate) fn print(args: &Cdi) -> anyhow::Result<ExitCode> {
    let libraries = libraries::find(&args.settings)?;
    let command = std::env::current_exe().context("cannot find my own executable")?;
    for path in [&libraries, &command] {
        check_readable(path)?;
    }
    let specification = specification(&args.settings, &libraries, &command)?;
    let text = serde_json::to_string_pretty(&specification)? + "\n";
    let Some(file) = &args.output else {
        return crate::write_out(text.as_bytes());
    };
    if file.is_dir() {
        bail!("{} is a directory: name a file in it, such as anyverbs.json", file.display());
    }
    if let Some(dir) = file.parent() {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    // An engine may read the directory at any time.
    let fresh = file.with_extension("new");
    fs::write(&fresh, text).with_context(|| format!("cannot write {}", fresh.display()))?;
    fs::rename(&fresh, file).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn specification(settings: &Settings, libraries: &Path, command: &Path) -> anyhow::Result<Value> {
    let mut environment =
        vec![format!("LD_LIBRARY_PATH={LIBRARIES}"), format!("ANYVERBS_LIB_DIR={LIBRARIES}")];
    let mut mounts = vec![mount(libraries, LIBRARIES)?, mount(command, COMMAND)?];
    if let Some(file) = &settings.config {
        let file = file
            .canonicalize()
            .with_context(|| format!("the configuration file {} does not exist", file.display()))?;
        mounts.push(mount(&file, CONFIG)?);
        environment.push(format!("ANYVERBS_CONFIG={CONFIG}"));
    }
    let name = settings.device.as_deref().unwrap_or(DEVICE);
    check_name(name)?;
    if settings.device.is_some() {
        environment.push(format!("ANYVERBS_DEVICE={name}"));
    }
    if let Some(level) = &settings.log {
        environment.push(format!("ANYVERBS_LOG={level}"));
    }
    Ok(json!({
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": [{
            "name": name,
            "containerEdits": { "env": environment, "mounts": mounts },
        }],
    }))
}

fn mount(host: &Path, container: &str) -> anyhow::Result<Value> {
    let host = host.to_str().with_context(|| format!("{} is no text", host.display()))?;
    Ok(json!({
        "hostPath": host,
        "containerPath": container,
        "options": ["ro", "nosuid", "nodev", "bind"],
    }))
}

/// Fails if the name is none of CDI's: letters and digits, with `_`, `-`, `.` and `:` between them.
fn check_name(name: &str) -> anyhow::Result<()> {
    let inner = |letter: char| letter.is_ascii_alphanumeric() || "_-.:".contains(letter);
    let ends = |letter: char| letter.is_ascii_alphanumeric();
    if !(name.starts_with(ends) && name.ends_with(ends) && name.chars().all(inner)) {
        bail!("a container engine takes no device with the name {name:?}");
    }
    Ok(())
}

/// Fails if other users cannot reach a file: the container's programs may run as any user.
fn check_readable(path: &Path) -> anyhow::Result<()> {
    let mode =
        fs::metadata(path).with_context(|| format!("cannot look at {}", path.display()))?.mode();
    if mode & 0o005 != 0o005 {
        bail!(
            "other users cannot read {}, and programs of a container may run as any: name a directory of the libraries that they \
             can (--lib-dir)",
            path.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(settings: &Settings) -> anyhow::Result<Value> {
        specification(settings, Path::new("/host/lib"), Path::new("/host/bin/anyverbs"))
    }

    #[test]
    fn libraries_and_command_are_mounted() {
        let specification = of(&Settings::default()).unwrap();
        assert_eq!(specification["kind"], "anyverbs/rdma");
        let device = &specification["devices"][0];
        assert_eq!(device["name"], "anyverbs0");
        let edits = &device["containerEdits"];
        assert_eq!(edits["env"][0], "LD_LIBRARY_PATH=/usr/local/lib/anyverbs");
        let mounts = edits["mounts"].as_array().unwrap();
        let pairs: Vec<_> = mounts.iter().map(|m| (&m["hostPath"], &m["containerPath"])).collect();
        let text = |text: &str| Value::from(text);
        assert_eq!(
            pairs,
            [
                (&text("/host/lib"), &text("/usr/local/lib/anyverbs")),
                (&text("/host/bin/anyverbs"), &text("/usr/local/bin/anyverbs")),
            ]
        );
        assert!(mounts.iter().all(|mount| mount["options"][0] == "ro"));
    }

    #[test]
    fn settings_go_into_the_container() {
        let config = std::env::current_exe().unwrap();
        let settings = Settings {
            config: Some(config),
            device: Some("mlx5_0".into()),
            log: Some("debug".into()),
            ..Settings::default()
        };
        let specification = of(&settings).unwrap();
        let device = &specification["devices"][0];
        assert_eq!(device["name"], "mlx5_0");
        let env = device["containerEdits"]["env"].as_array().unwrap();
        for variable in
            ["ANYVERBS_DEVICE=mlx5_0", "ANYVERBS_LOG=debug", "ANYVERBS_CONFIG=/etc/anyverbs.toml"]
        {
            assert!(env.iter().any(|v| v == variable), "{variable} in {env:?}");
        }
        assert_eq!(device["containerEdits"]["mounts"][2]["containerPath"], "/etc/anyverbs.toml");
    }

    /// The values of a key in lines of YAML such as `- mountPath: /a`.
    fn values<'t>(yaml: &'t str, key: &str) -> Vec<&'t str> {
        let value = |line: &'t str| {
            line.trim_start().trim_start_matches("- ").strip_prefix(key)?.strip_prefix(": ")
        };
        yaml.lines().filter_map(value).collect()
    }

    #[test]
    fn the_sample_for_kubernetes_has_the_names_of_the_description() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/kubernetes");
        let [pods, kind, steps] = ["pods.yaml", "kind.yaml", "try.sh"]
            .map(|name| fs::read_to_string(folder.join(name)).unwrap());
        // Where `install.sh --prefix` of the steps puts the files.
        let prefix = "/opt/anyverbs";
        assert!(steps.contains(&format!("install.sh\" --prefix {prefix}\n")), "{steps}");
        let (libraries, command) =
            (format!("{prefix}/lib/anyverbs"), format!("{prefix}/bin/anyverbs"));
        let described =
            specification(&Settings::default(), Path::new(&libraries), Path::new(&command))
                .unwrap();
        let device = &described["devices"][0];
        let name =
            format!("{}={}", described["kind"].as_str().unwrap(), device["name"].as_str().unwrap());
        assert!(steps.contains(&format!("--device {name} ")), "{name} is not in the steps");
        let edits = &device["containerEdits"];
        let mounts = edits["mounts"].as_array().unwrap();
        let texts = |key: &str| -> Vec<&str> {
            mounts.iter().map(|mount| mount[key].as_str().unwrap()).collect()
        };
        // Each of the two pods has them, in this order.
        assert_eq!(values(&pods, "mountPath"), texts("containerPath").repeat(2));
        assert_eq!(values(&pods, "path"), texts("hostPath").repeat(2));
        let variables = edits["env"].as_array().unwrap().iter();
        let (names, settings): (Vec<_>, Vec<_>) =
            variables.map(|variable| variable.as_str().unwrap().split_once('=').unwrap()).unzip();
        assert_eq!(values(&pods, "value"), settings.repeat(2));
        for name in names {
            assert_eq!(pods.matches(&format!("- name: {name}\n")).count(), 2, "{name}");
        }
        // The nodes have the files under the names that the description gives.
        let shared = [prefix, "/etc/cdi"];
        assert_eq!(values(&kind, "hostPath"), shared);
        assert_eq!(values(&kind, "containerPath"), shared);
        assert!(kind.contains("cdi_spec_dirs = [\"/etc/cdi\"]"), "{kind}");
        assert!(steps.contains("cdi --output /etc/cdi/anyverbs.json\n"), "{steps}");
    }

    #[test]
    fn what_no_engine_takes_is_refused() {
        let named = |name: &str| of(&Settings { device: Some(name.into()), ..Settings::default() });
        named("rxe0").unwrap();
        for name in ["", "a=b", "a b", "_a", "a_"] {
            assert!(named(name).is_err(), "{name:?}");
        }
        let config = Some("/nonexistent".into());
        assert!(of(&Settings { config, ..Settings::default() }).is_err());
    }

    #[test]
    fn a_directory_of_one_user_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = std::env::temp_dir().join(format!("anyverbs-cdi-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let checks = [0o700, 0o755].map(|mode| {
            fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
            check_readable(&dir).is_ok()
        });
        fs::remove_dir(&dir).unwrap();
        assert_eq!(checks, [false, true]);
    }
}
