//! The `anyverbs` command.
fn main() {}
