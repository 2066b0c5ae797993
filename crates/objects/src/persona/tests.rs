use super::*;

#[test]
fn every_built_in_persona_is_read_and_names_its_sources() {
    for (name, text) in BUILT_IN {
        let persona = Persona::parse(name, text).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(Persona::built_in(name), Some(persona));
        let head: Vec<_> = text.lines().take_while(|line| line.starts_with('#')).collect();
        assert!(head.iter().any(|line| line.contains("Sources:")), "{name}: no sources");
    }
    assert_eq!(Persona::built_in("efa"), None);
}

/// The built-in persona `name` with a line of its file replaced.
fn changed(name: &str, from: &str, to: &str) -> Result<Persona, String> {
    let (_, text) = BUILT_IN.iter().find(|(known, _)| *known == name).unwrap();
    assert!(text.contains(from), "{from}");
    Persona::parse("own", &text.replacen(from, to, 1))
}

#[test]
fn a_persona_promises_no_more_than_the_engine_holds() {
    let error = changed("mlx5", "max_sge = 30", "max_sge = 33").unwrap_err();
    let (place, reason) = error.split_once(": ").unwrap();
    assert!(place.starts_with("line "), "{place}");
    assert_eq!(reason, "limits.max_sge = 33: this device holds 1 to 32");
    assert!(changed("mlx5", "max_sge = 30", "max_sge = 0").is_err());
    for name in Persona::names() {
        let attr = Persona::built_in(name).unwrap().apply(limits::DEFAULT);
        assert!(attr.max_sge <= limits::DEFAULT.max_sge && attr.max_sge_rd <= attr.max_sge);
    }
}

#[test]
fn bad_files_are_refused_in_one_line_with_the_place() {
    for (from, to, part) in [
        ("rate = ", "colour = 1\nrate = ", "colour"),
        ("rate = 100", "rate = 99", "rate = 99"),
        ("rate = 100", "rate = \"fast\"", "line"),
        ("fw_ver = \"", "fw_ver = \"\\u0007", "fw_ver"),
        ("oui = \"", "oui = \"b8:ce:", "oui"),
        ("oui = \"", "oui = \"+", "oui"),
        ("device = \"mlx5_0\"", "device = \"a/b\"", "device"),
        ("types = [\"RoCE v1\", \"RoCE v2\"]", "types = [\"RoCE v1\"]", "gids"),
        ("types = [\"RoCE v1\", \"RoCE v2\"]", "types = [\"RoCE v2\", \"RoCE v2\"]", "gids"),
        ("types = [\"RoCE v1\", \"RoCE v2\"]", "types = [\"RoCE v3\"]", "RoCE v3"),
        ("driver = \"mlx5_core\"", "driver = \"..\"", "pci.driver"),
        ("class = 0x020000", "class = 0x1020000", "pci.class = 0x1020000: "),
        ("speed = 160", "speed = 7", "pci.speed = 7: "),
        ("width = 16", "width = 3", "pci.width = 3: "),
        ("lacks = [", "lacks = [\"wings\", ", "wings"),
        ("lacks = [", "lacks = \"rc\" # [", "expected a list of features, as [\"rc\"]"),
        ("lacks = [", "lacks = [1, ", "integer `1`, expected the name of a feature"),
        ("max_sge = 30", "max_sge = 18446744073709551615", "this device holds 1 to 32"),
        ("[limits]\n", "limits = [1]\n[pci.other]\n", "expected a table"),
        ("max_sge = 30", "max_sge = -1", "limits.max_sge = -1: this device holds 1 to 32"),
    ] {
        let (_, text) = BUILT_IN.iter().find(|(known, _)| *known == "mlx5").unwrap();
        let line = text[..text.find(from).unwrap()].matches('\n').count() + 1;
        let error = changed("mlx5", from, to).unwrap_err();
        assert!(error.contains(part) && !error.contains('\n'), "{to}: {error}");
        assert!(error.contains(&format!("line {line}")), "{to}, line {line}: {error}");
    }
}

#[test]
fn what_a_persona_lacks_has_no_limit() {
    let attr = Persona::built_in("irdma").unwrap().apply(limits::DEFAULT);
    assert!(attr.lacks.has(Feature::Srq) && !attr.lacks.has(Feature::Ud));
    assert_eq!((attr.max_srq, attr.max_num_tags, attr.max_dm_size), (0, 0, 0));
}

#[test]
fn a_guid_begins_with_the_vendors_bits() {
    let persona = Persona::built_in("mlx5").unwrap();
    assert_eq!(persona.guid(0x0212_3456_789a_bcde), 0xb8ce_f656_789a_bcde);
    assert_eq!(Persona::built_in("rxe").unwrap().guid(0x0212), 0x0212);
}
