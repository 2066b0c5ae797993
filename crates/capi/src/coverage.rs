//! `docs/coverage.md`: for every exported name and every header inline, whether it works, works in part or refuses.
//!
//! The page is made from the code's own tables, and a test compares the two, so that it agrees with the code. A call in
//! a `refuse!` group refuses, every other exported call has a body, and a dispatch slot that is empty refuses.
//! `UPDATE_COVERAGE=1 cargo test -p anyverbs-capi coverage` writes the page.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::Path,
};

use crate::{
    compat,
    exports::EXPORTS,
    private,
    refuse::{Convention, Refusal},
    vendor,
    verbs::{self, slots},
};

/// Calls whose body does not yet do everything on the manual page, and the missing parts.
const PARTIAL: &[(&str, &str)] = &[
    ("ibv_create_qp", "RC, UC, UD, XRC_SEND, RAW_PACKET; DRIVER: `EOPNOTSUPP`"),
    ("ibv_modify_qp", "alternate paths: `EOPNOTSUPP`; resizing of the queues: `EINVAL`"),
    ("ibv_query_ece", "there are no enhancements (`EOPNOTSUPP`)"),
    ("rdma_set_option", "`RDMA_OPTION_IB_PATH`: `ENOSYS`"),
    ("rdma_getaddrinfo", "`RAI_SA`: `EOPNOTSUPP`"),
    ("rdma_resolve_addrinfo", "`RAI_SA`: `EOPNOTSUPP`"),
    ("ibv_set_ece", "refuses every value: there are no enhancements (`EOPNOTSUPP`)"),
    ("ibv_import_pd", "of another process: `EOPNOTSUPP`"),
    ("ibv_import_mr", "of another process: `EOPNOTSUPP`"),
    ("ibv_export_buf_dmabuf_fd", "-1 with `ENODATA`: no buffer has a dma-buf behind it"),
    ("ibv_dm_export_dmabuf_fd", "needs `/dev/udmabuf`; without it `EOPNOTSUPP`"),
];

/// As `PARTIAL`, for inlines.
const PARTIAL_SLOTS: &[(&str, &str)] = &[
    (
        "ibv_create_qp_ex",
        "PD, XRCD, SEND_OPS_FLAGS, BLOCK_SELF_MCAST_LB; RAW_PACKET: SCATTER_FCS, CVLAN_STRIPPING, MAX_TSO_HEADER, IND_TABLE with RX_HASH; other extensions: `EOPNOTSUPP`",
    ),
    (
        "ibv_open_xrcd",
        "processes of one user share the domain of a file, processes of different users do not",
    ),
    ("ibv_post_send", "FLUSH, for which `ibv_send_wr` has no fields: `EOPNOTSUPP`"),
    (
        "ibv_create_flow",
        "QPs of type RAW_PACKET; rules of different processes do not rank among each other",
    ),
    (
        "ibv_create_flow_action_esp",
        "inline encryption in transport mode, padding against traffic analysis in transport mode: `EOPNOTSUPP`",
    ),
];

/// All refusals of today's interfaces; `compat` has names of its own, for programs of 2005.
fn refused() -> BTreeMap<&'static str, &'static Refusal> {
    let tables = [
        verbs::REFUSED,
        private::REFUSED,
        vendor::mlx5::REFUSED,
        vendor::mlx4::REFUSED,
        vendor::efa::REFUSED,
    ];
    tables.into_iter().flatten().map(|r| (r.name, r)).collect()
}

fn how(refusal: &Refusal) -> String {
    let errno = match refusal.errno {
        libc::EOPNOTSUPP => "`EOPNOTSUPP`",
        libc::ENOSYS => "`ENOSYS`",
        _ => "",
    };
    match refusal.convention {
        Convention::Null => format!("NULL, {errno}"),
        Convention::Errno => format!("returns {errno}"),
        Convention::MinusOne => format!("-1, {errno}"),
        Convention::NegativeErrno => format!("returns -{errno}"),
        Convention::Void => "does nothing".into(),
        Convention::No => "returns 0".into(),
    }
}

fn status(name: &str, refused: &BTreeMap<&str, &Refusal>) -> (&'static str, String) {
    if let Some(refusal) = refused.get(name) {
        ("refuses", how(refusal))
    } else if let Some((_, what)) = PARTIAL.iter().find(|(n, _)| *n == name) {
        ("partial", (*what).into())
    } else {
        ("works", String::new())
    }
}

fn page() -> String {
    let refused = refused();
    let mut text = String::from(
        "# Coverage of the C ABI\n\n\
         `UPDATE_COVERAGE=1 cargo test -p anyverbs-capi coverage` makes this page from the tables of `crates/capi`, \
         and a test compares it with the code.\n\n\
         *works*: does everything on its manual page. *partial*: works, except for the named parts. *refuses*: not \
         built; fails in the way of its manual page.\n",
    );
    let sections: [(&str, &str, bool); 6] = [
        ("libibverbs", "libibverbs", false),
        ("libibverbs", "libibverbs, private interface (for provider libraries)", true),
        ("librdmacm", "librdmacm", false),
        ("libmlx5", "libmlx5", false),
        ("libmlx4", "libmlx4", false),
        ("libefa", "libefa", false),
    ];
    for (i, (library, title, private)) in sections.into_iter().enumerate() {
        let names: BTreeSet<&str> = EXPORTS
            .iter()
            .filter(|e| e.library == library && e.version.contains("PRIVATE") == private)
            .map(|e| match e.name.strip_prefix("verbs_register_driver_") {
                Some(_) => "verbs_register_driver",
                None => e.name,
            })
            .collect();
        section(&mut text, title, names.iter().map(|n| (*n, status(n, &refused))));
        if i == 0 {
            let slots = slots().into_iter().map(|s| {
                let partial = PARTIAL_SLOTS.iter().find(|(verb, _)| *verb == s.verb);
                let state = match partial {
                    _ if !s.built => ("refuses", s.refusal.into()),
                    Some((_, what)) => ("partial", (*what).into()),
                    None => ("works", String::new()),
                };
                (s.verb, state)
            });
            section(&mut text, "libibverbs, inlines of `verbs.h` (through the context)", slots);
        }
    }
    text.push_str(
        "\n## Ports\n\nA device has one port, or two if the configuration file says so \
         ([how](recipes/several-devices.md#two-ports)). Calls refuse a port that the device does not have (`EINVAL`). \
         Raw packets of all ports are on one network: a flow rule of either port gets frames that a queue pair of the other one sends. \
         There is no path migration, so `alt_port_num` has no use.\n",
    );
    let _ = writeln!(
        text,
        "\n## Programs of 2005\n\nThe {} calls that are also exported under IBVERBS_1.0 or MLX5_1.0 refuse there \
         (`ENOSYS`): objects of that interface had another layout.",
        compat::REFUSED.len()
    );
    text
}

fn section<'a>(
    text: &mut String,
    title: &str,
    rows: impl Iterator<Item = (&'a str, (&'static str, String))>,
) {
    let rows: Vec<_> = rows.collect();
    let count = |s| rows.iter().filter(|(_, (status, _))| *status == s).count();
    let _ = writeln!(
        text,
        "\n## {title}\n\n{} calls: {} work, {} partial, {} refuse.\n\n| call | state | how |\n|---|---|---|",
        rows.len(),
        count("works"),
        count("partial"),
        count("refuses"),
    );
    for (name, (status, how)) in rows {
        let _ = writeln!(text, "| `{name}` | {status} | {how} |");
    }
}

#[test]
fn the_page_says_what_the_code_does() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/coverage.md");
    let page = page();
    if std::env::var_os("UPDATE_COVERAGE").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page,
        "docs/coverage.md is out of date: UPDATE_COVERAGE=1 cargo test -p anyverbs-capi coverage"
    );
}

#[test]
fn every_refusal_and_partial_is_of_an_exported_name() {
    let exported: BTreeSet<&str> = EXPORTS.iter().map(|e| e.name).collect();
    let known = |name: &str| exported.contains(name) || name == "verbs_register_driver";
    for name in refused().keys().chain(PARTIAL.iter().map(|(n, _)| n)) {
        assert!(known(name), "{name} is not exported");
    }
    for (name, _) in PARTIAL {
        assert!(!refused().contains_key(name), "{name} is both partial and refused");
    }
    let old: BTreeSet<&str> = EXPORTS
        .iter()
        .filter(|e| !e.default && !e.version.contains("PRIVATE"))
        .map(|e| e.name)
        .collect();
    for refusal in compat::REFUSED {
        assert!(old.contains(refusal.name), "{} has no old version", refusal.name);
    }
}
