//! A finding of `run --check`, as it stands in a line of the report.

use serde::Deserialize;

/// A finding of `--check`.
#[derive(Debug, Deserialize)]
pub(crate) struct Finding {
    pub(crate) check: String,
    #[serde(default)]
    pub(crate) process: u64,
    #[serde(default)]
    pub(crate) message: String,
    #[serde(default)]
    pub(crate) why: String,
    #[serde(default)]
    pub(crate) remedy: String,
    #[serde(default)]
    pub(crate) stacks: Vec<Stack>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Stack {
    #[serde(default)]
    pub(crate) title: String,
    #[serde(default)]
    pub(crate) frames: Vec<Frame>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Frame {
    #[serde(default)]
    pub(crate) function: Option<String>,
    #[serde(default)]
    pub(crate) file: Option<String>,
    #[serde(default)]
    pub(crate) line: Option<u32>,
    /// Without a file: the path of the object that has the code, and the distance from where that begins.
    #[serde(default)]
    pub(crate) object: Option<String>,
    #[serde(default)]
    pub(crate) offset: Option<u64>,
}
