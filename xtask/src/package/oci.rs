//! An image for containers, as an archive of an OCI image layout: no engine and no registry has a part in making it.
//!
//! The image holds the command with the libraries inside, and no C library. It is there to be copied from:
//! `COPY --from=anyverbs:VERSION / /`.

use std::process::Command;

use anyhow::Context;
use serde_json::{Value, json};

use super::archive::{Tree, gzip, hex, sha256};
use super::build::{Built, Machine, check_size, output, read};
use super::licences;
use crate::workspace::root;

/// The archive.
pub(super) fn make(built: &Built, one_file: &[u8]) -> anyhow::Result<Vec<u8>> {
    const DOC: &str = "usr/local/share/doc/anyverbs";
    let mut files = Tree::default();
    files.executable("usr/local/bin/anyverbs", one_file);
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        files.file(format!("{DOC}/{name}"), read(&root().join(name))?);
    }
    files.file(format!("{DOC}/{}", licences::NAME), &built.licences[..]);
    check_size("the image", &files)?;
    layout(built.machine, built.version, built.epoch, &files)
}

fn layout(machine: Machine, version: &str, epoch: u64, files: &Tree) -> anyhow::Result<Vec<u8>> {
    let mut archive = Tree::default();
    let mut blob = |kind: &str, bytes: Vec<u8>| {
        let digest = hex(&sha256(&bytes));
        let descriptor = json!({
            "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": format!("sha256:{digest}"),
            "size": bytes.len(),
        });
        let path = format!("blobs/sha256/{digest}");
        archive.file(&path, bytes);
        (descriptor, path)
    };
    let tar = files.tar("", epoch)?;
    let difference = format!("sha256:{}", hex(&sha256(&tar)));
    let (layer, layer_path) = blob("layer.v1.tar+gzip", gzip(&tar)?);
    let created =
        output(Command::new("date").args(["--utc", "+%FT%TZ", "--date"]).arg(format!("@{epoch}")))?;
    let config = json!({
        "created": created,
        "architecture": machine.debian,
        "os": "linux",
        "config": {},
        "rootfs": { "type": "layers", "diff_ids": [difference] },
    });
    let (config, config_path) = blob("config.v1+json", text(&config)?);
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": [layer],
        "annotations": {
            "org.opencontainers.image.title": "anyverbs",
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
            "org.opencontainers.image.source": env!("CARGO_PKG_REPOSITORY"),
        },
    });
    let (mut manifest, _) = blob("manifest.v1+json", text(&manifest)?);
    let name = format!("anyverbs:{version}");
    manifest["platform"] = json!({ "architecture": machine.debian, "os": "linux" });
    manifest["annotations"] = json!({
        "org.opencontainers.image.ref.name": version,
        "io.containerd.image.name": name,
    });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [manifest],
    });
    archive.file("oci-layout", text(&json!({ "imageLayoutVersion": "1.0.0" }))?);
    archive.file("index.json", text(&index)?);
    // `docker load` before version 25 reads this list alone.
    let list = json!([{ "Config": config_path, "RepoTags": [name], "Layers": [layer_path] }]);
    archive.file("manifest.json", text(&list)?);
    archive.tar("", epoch)
}

fn text(value: &Value) -> anyhow::Result<Vec<u8>> {
    serde_json::to_vec(value).context("cannot write JSON")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use super::super::build::MACHINES;
    use super::*;

    fn files(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(archive).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            files.insert(entry.path().unwrap().display().to_string(), bytes);
        }
        files
    }

    #[test]
    fn every_descriptor_leads_to_its_blob() {
        let mut tree = Tree::default();
        tree.executable("usr/local/bin/anyverbs", "program");
        let archive = layout(MACHINES[1], "1.2.3", 7, &tree).unwrap();
        assert_eq!(archive, layout(MACHINES[1], "1.2.3", 7, &tree).unwrap());
        let files = files(&archive);
        let json = |path: &str| serde_json::from_slice::<Value>(&files[path]).unwrap();
        let follow = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
            let path = format!("blobs/sha256/{digest}");
            assert_eq!(hex(&sha256(&files[&path])), digest);
            assert_eq!(descriptor["size"], files[&path].len());
            path
        };
        let manifest = json(&follow(&json("index.json")["manifests"][0]));
        let config = json(&follow(&manifest["config"]));
        assert_eq!(config["architecture"], "arm64");
        assert_eq!(config["created"], "1970-01-01T00:00:07Z");
        let layer = follow(&manifest["layers"][0]);
        let mut tar = Vec::new();
        flate2::read::GzDecoder::new(&files[&layer][..]).read_to_end(&mut tar).unwrap();
        let difference = format!("sha256:{}", hex(&sha256(&tar)));
        assert_eq!(config["rootfs"]["diff_ids"], json!([difference]));
        assert_eq!(self::files(&tar)["usr/local/bin/anyverbs"], b"program");
        let list = json("manifest.json");
        assert_eq!(list[0]["RepoTags"][0], "anyverbs:1.2.3");
        assert_eq!(list[0]["Layers"][0], layer);
    }
}
