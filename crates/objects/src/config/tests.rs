use super::*;

fn config(variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    Config::from_variables(|name| {
        variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
    })
}

#[test]
fn a_script_of_faults_has_rules_and_is_read_whole() {
    let fails = |value: &str| {
        let variable = |name: &str| (name == "ANYVERBS_FAULTS").then(|| value.to_owned());
        Config::parse("", "", variable).map(drop).unwrap_err().to_string()
    };
    assert!(fails("/dev/zero").contains("no regular file"));
    let file = std::env::temp_dir().join(format!("anyverbs-script-{}", std::process::id()));
    for (text, reason) in [
        ("# nothing\n".to_owned(), "neither rules nor a seed"),
        ("# more\n".repeat(1 << 18), "longer than 1 MiB"),
    ] {
        std::fs::write(&file, text).unwrap();
        let said = fails(file.to_str().unwrap());
        assert!(said.contains(reason), "{said}");
    }
    std::fs::remove_file(file).unwrap();
    // One that a configuration file names lies beside that.
    let dir = std::env::temp_dir().join(format!("anyverbs-scripts-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("own.toml");
    std::fs::write(&file, "faults = 'own.fault'").unwrap();
    std::fs::write(dir.join("own.fault"), "\u{feff}drop packet 1; drop packet 2").unwrap();
    let file = file.to_str().unwrap();
    let script = config(&[("ANYVERBS_CONFIG", file)]).unwrap().faults.unwrap();
    assert_eq!(script.rules.len(), 2);
    let other = [("ANYVERBS_CONFIG", file), ("ANYVERBS_FAULTS", "own.fault")];
    let said = config(&other).map(drop).unwrap_err().to_string();
    assert!(said.starts_with("cannot read the script of faults \"own.fault\""), "{said}");
    // Its mistakes, and those of a script within the configuration, are told with the file.
    let said = || config(&[("ANYVERBS_CONFIG", file)]).map(drop).unwrap_err().to_string();
    std::fs::write(dir.join("own.fault"), "drop packet 1\non device rail9: down").unwrap();
    let own = dir.join("own.fault");
    let wanted = format!("faults in {}, line 2: there is no device", own.display());
    assert!(said().starts_with(&wanted), "{}", said());
    std::fs::write(&own, "drop pocket 1").unwrap();
    let wanted = format!("faults in {}: line 1, column 6: ", own.display());
    assert!(said().starts_with(&wanted), "{}", said());
    for (script, place) in
        [("drop pocket 1", ": line 1, column 6"), ("on device rail9: down", ", line 1: ")]
    {
        std::fs::write(file, format!("faults = '{script}'")).unwrap();
        let wanted = format!("configuration file {file:?}: faults{place}");
        assert!(said().starts_with(&wanted), "{}", said());
    }
    std::fs::remove_dir_all(dir).unwrap();
    for script in ["seed 1", "ibv_reg_mr 1 fails with EIO"] {
        let config = config(&[("ANYVERBS_FAULTS", script)]).unwrap();
        assert!(!config.direct && config.faults.is_some(), "rules may come later");
    }
}

#[test]
fn nothing_set_gives_the_defaults() {
    assert_eq!(config(&[]).unwrap(), Config::default());
    assert_eq!(config(&[("ANYVERBS_UDP_PORT", "")]).unwrap(), Config::default());
}

#[test]
fn variables_are_read() {
    let c = config(&[
        ("ANYVERBS_UDP_PORT", "5000"),
        ("ANYVERBS_INTERFACES", "lo, eth0"),
        ("ANYVERBS_GSO", "off"),
        ("ANYVERBS_LOSS", "0.01"),
        ("ANYVERBS_FAULT_SEED", "7"),
    ])
    .unwrap();
    assert_eq!((c.udp_port, c.udp.gso), (5000, false));
    assert!(!c.shm, "faults are those of a network");
    assert!(!config(&[("ANYVERBS_SHM", "0")]).unwrap().shm);
    let named = Addresses::Interfaces(vec!["lo".into(), "eth0".into()]);
    assert_eq!(c.ports[0].addresses, named);
    let fault = c.fault.unwrap();
    assert_eq!((fault.loss, fault.seed), (0.01, 7));
}

#[test]
fn a_parse_error_is_one_line_with_the_variables_name() {
    for (variable, value) in [
        ("ANYVERBS_UDP_PORT", "0"),
        ("ANYVERBS_UDP_PORT", "70000"),
        ("ANYVERBS_GSO", "perhaps"),
        ("ANYVERBS_WINDOW", "-1"),
        ("ANYVERBS_LOSS", "1.5"),
        ("ANYVERBS_LOSS", "NaN"),
        ("ANYVERBS_DEVICE", "a/b"),
        ("ANYVERBS_DEVICE", "."),
        ("ANYVERBS_DEVICE", ".."),
        ("ANYVERBS_DEVICE", "a\nb"),
        ("ANYVERBS_REGISTRY", "."),
        ("ANYVERBS_REGISTRY", "a\tb"),
        ("ANYVERBS_MAX_QP", "0"),
        ("ANYVERBS_RAW_INTERFACE", "a name that no interface has"),
        ("ANYVERBS_CONFIG", "/nonexistent/anyverbs.toml"),
        ("ANYVERBS_PERSONA", "connectx"),
        ("ANYVERBS_PERSONA", "/nonexistent/persona.toml"),
    ] {
        let text = config(&[(variable, value)]).unwrap_err().to_string();
        assert!(!text.contains('\n'), "{text}");
        assert!(text.contains(variable) || text.contains(value), "{text}");
    }
}

#[test]
fn a_device_is_named_by_up_to_48_bytes() {
    let device = |name: &str| config(&[("ANYVERBS_DEVICE", name)]).map(|c| c.ports[0].name.clone());
    for name in ["a", "...", ".a", "mlx5_0", "uverbs", "uverbs0a", &"n".repeat(48)] {
        assert_eq!(device(name).as_deref(), Ok(name));
    }
    let bad = ["two words", "a\tb", "a:1", "a;b", "a#b", "rdma_cm", "uverbs0", "uverbs12"];
    for name in bad.into_iter().chain([&*"n".repeat(49)]) {
        assert!(device(name).is_err(), "{name}");
        let file = format!("devices = [{{ name = {name:?} }}]");
        let error = Config::parse("rack.toml", &file, |_| None).unwrap_err().to_string();
        assert!(error.contains(crate::text::DEVICE_NAME), "{error}");
    }
}

#[test]
fn a_configuration_that_would_not_end_is_refused() {
    let error = config(&[("ANYVERBS_CONFIG", "/dev/zero")]).unwrap_err().to_string();
    assert!(error.contains("/dev/zero") && error.contains("it is longer than 1 MiB"), "{error}");
}

#[test]
fn the_environment_goes_before_the_file() {
    let path = std::env::temp_dir().join(format!("anyverbs-config-{}.toml", std::process::id()));
    std::fs::write(&path, "udp_port = 6000\ngso = false\n").unwrap();
    let file = path.to_str().unwrap();
    let c = config(&[("ANYVERBS_CONFIG", file), ("ANYVERBS_UDP_PORT", "6001")]).unwrap();
    assert_eq!((c.udp_port, c.udp.gso), (6001, false));
    for bad in ["udp_port = 0", "udp_port = \"x\"", "nonsense = 1", "]["] {
        std::fs::write(&path, bad).unwrap();
        let text = config(&[("ANYVERBS_CONFIG", file)]).unwrap_err().to_string();
        assert!(!text.contains('\n'), "{text}");
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn the_seed_of_the_variable_goes_before_that_of_the_script_and_then_of_the_file() {
    let seed = |file: &str, script: &str, given: &str| {
        let variables = [("ANYVERBS_FAULTS", script), ("ANYVERBS_FAULT_SEED", given)];
        let value = |name: &str| {
            let found = variables.iter().find(|(variable, _)| *variable == name)?;
            Some(found.1.to_owned())
        };
        let config = Config::parse("", file, value).unwrap();
        (config.fault_seed, config.fault.map(|policy| policy.seed))
    };
    let rule = "drop 1% of packets";
    assert_eq!(seed("", rule, ""), (1, None));
    assert_eq!(seed("fault_seed = 3", rule, ""), (3, None));
    assert_eq!(seed("fault_seed = 3", "seed 7", ""), (7, None));
    assert_eq!(seed("fault_seed = 3", "seed 7", "5"), (5, None));
    // Packets that are lost by a variable have no script.
    assert_eq!(seed("loss = 0.1\nfault_seed = 3", "seed 7", ""), (7, Some(3)));
    assert_eq!(seed("loss = 0.1\nfault_seed = 3", "seed 7", "5"), (5, Some(5)));
}
