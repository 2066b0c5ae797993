//! The exported names: the scope in which the generated trampolines look for each function, and the table of them.

/// One exported (symbol, version), from `abi/*.symbols`.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) library: &'static str,
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    pub(crate) default: bool,
}

#[cfg(test)]
pub(crate) const EXPORTS: &[Export] = include!(concat!(env!("OUT_DIR"), "/export_table.rs"));

// A test binary is no shared object: it has no versions to give out.
#[cfg(not(test))]
mod trampolines {
    use crate::{compat, private::*, rdmacm::*, rsocket::*, vendor::*, verbs::*};

    #[cfg(target_arch = "x86_64")]
    macro_rules! jump {
        ($to:literal) => {
            concat!("jmp ", $to)
        };
    }
    #[cfg(target_arch = "aarch64")]
    macro_rules! jump {
        ($to:literal) => {
            concat!("b ", $to)
        };
    }

    include!(concat!(env!("OUT_DIR"), "/trampolines.rs"));
}
