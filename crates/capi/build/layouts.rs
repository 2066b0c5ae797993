//! From `abi/layouts.65.txt` to compile-time checks: size and alignment of each type, offset and size of each field,
//! value of each enumerator.

use std::fmt::Write as _;

/// Names that the Rust side gives to C's anonymous members, by type and offset. Empty: the Rust type is the union.
const ANONYMOUS: &[(&str, &str, &str)] = &[
    ("ibv_wc", "24", "data"),
    ("ibv_send_wr", "36", "data"),
    ("ibv_send_wr", "80", "ext"),
    ("rdma_addr", "0", "src"),
    ("rdma_addr", "128", "dst"),
    ("ibv_flow_spec", "0", ""),
];

/// The checks, as Rust items.
pub(crate) fn asserts(table: &str) -> String {
    let mut text = String::new();
    let mut owner = "";
    // The Rust name of the anonymous member that the following lines are in.
    let mut anonymous = "";
    for line in table.lines().filter(|l| !l.is_empty()) {
        if let Some(rest) = line.strip_prefix("enum ") {
            let mut words = rest.split_whitespace().skip(1);
            let (name, value) = (words.next(), words.nth(1));
            let (Some(name), Some(value)) = (name, value) else { panic!("layouts: {line}") };
            let _ = writeln!(text, "const _: () = assert!({name} as i64 == {value}, {name:?});");
        } else if let Some(field) = line.strip_prefix("    ") {
            let mut words = field.split_whitespace();
            let path = words.next().unwrap_or_else(|| panic!("layouts: {line}"));
            let (offset, size) = (attribute(field, "off="), attribute(field, "size="));
            if path == "<anon>" {
                anonymous = ANONYMOUS
                    .iter()
                    .find(|(o, at, _)| *o == owner && *at == offset)
                    .unwrap_or_else(|| panic!("{owner} has a new anonymous member at {offset}"))
                    .2;
            }
            // The inside of pthread types is libc's.
            if path.contains(".__") {
                continue;
            }
            let path = rust_path(path, anonymous);
            if path.is_empty() {
                continue;
            }
            let _ = writeln!(
                text,
                "const _: () = assert!(offset_of!({owner}, {path}) == {offset}, \"{owner}.{path}\");"
            );
            let _ = writeln!(
                text,
                "const _: () = {{ let v = MaybeUninit::<{owner}>::uninit();\n
                 // SAFETY: only the place's address is taken, inside `v`.\n\
                 assert!(pointee_size(unsafe {{ &raw const (*v.as_ptr()).{path} }}) == {size}, \"{owner}.{path}\"); }};"
            );
        } else {
            owner = line.split_whitespace().nth(1).unwrap_or_else(|| panic!("layouts: {line}"));
            let (size, align) = (attribute(line, "size="), attribute(line, "align="));
            let _ = writeln!(
                text,
                "const _: () = assert!(size_of::<{owner}>() == {size} && align_of::<{owner}>() == {align}, {owner:?});"
            );
        }
    }
    text
}

fn attribute<'a>(line: &'a str, key: &str) -> &'a str {
    let word = line.split_whitespace().find_map(|w| w.strip_prefix(key));
    word.unwrap_or_else(|| panic!("layouts: no {key} in: {line}"))
}

fn rust_path(path: &str, anonymous: &str) -> String {
    path.split('.')
        .map(|part| match part {
            "<anon>" => anonymous,
            "type" => "r#type",
            "priv" => "r#priv",
            other => other,
        })
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(".")
}
