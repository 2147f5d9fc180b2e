//! Manifests of OVF packages: a digest for each file (DMTF DSP0243, section 5.1).

use std::collections::BTreeMap;

use ring::digest;

use crate::definition::ImportError;
use crate::shown::shown;

/// Most files that a manifest names.
const MOST_FILES: usize = 256;

/// The digests of a package's files, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest(BTreeMap<String, (Algorithm, String)>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Algorithm {
    Sha1,
    Sha256,
    Sha512,
}

/// A digest that is being computed.
#[derive(Clone)]
pub struct Digest(digest::Context);

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Digest")
    }
}

impl Digest {
    /// Begins a digest by SHA-256.
    #[must_use]
    pub fn sha256() -> Digest {
        Digest(digest::Context::new(&digest::SHA256))
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the digest in hexadecimal.
    #[must_use]
    pub fn hex(self) -> String {
        self.0.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl Manifest {
    /// Reads a manifest: lines such as `SHA256(web.ovf)= 00ff…`.
    ///
    /// # Errors
    /// A line has another form, or there are too many.
    pub fn parse(text: &str) -> Result<Manifest, ImportError> {
        let mut files = BTreeMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let parts = line.split_once('(').and_then(|(algorithm, rest)| {
                let (file, digest) = rest.rsplit_once(')')?;
                let digest = digest.trim_start().strip_prefix('=')?.trim().to_ascii_lowercase();
                let algorithm = match algorithm.trim() {
                    "SHA1" => Algorithm::Sha1,
                    "SHA256" => Algorithm::Sha256,
                    "SHA512" => Algorithm::Sha512,
                    _ => return None,
                };
                Some((file.to_owned(), (algorithm, digest)))
            });
            let (file, digest) = parts.ok_or_else(|| {
                ImportError::Invalid(format!("its manifest has the line \"{}\"", shown(line)))
            })?;
            files.insert(file, digest);
            if files.len() > MOST_FILES {
                return Err(ImportError::Invalid("its manifest names too many files".to_owned()));
            }
        }
        Ok(Manifest(files))
    }

    /// Returns a digest to compute over a file, and its expected value; `None` if the manifest does
    /// not name the file.
    #[must_use]
    pub fn check_of(&self, file: &str) -> Option<(Digest, &str)> {
        let (algorithm, wanted) = self.0.get(file)?;
        let algorithm = match algorithm {
            Algorithm::Sha1 => &digest::SHA1_FOR_LEGACY_USE_ONLY,
            Algorithm::Sha256 => &digest::SHA256,
            Algorithm::Sha512 => &digest::SHA512,
        };
        Some((Digest(digest::Context::new(algorithm)), wanted))
    }

    /// Adds a file with its digest by SHA-256, in hexadecimal.
    pub fn add(&mut self, file: &str, digest: String) {
        self.0.insert(file.to_owned(), (Algorithm::Sha256, digest));
    }

    /// Returns the text of the manifest.
    #[must_use]
    pub fn text(&self) -> String {
        let name = |algorithm| match algorithm {
            Algorithm::Sha1 => "SHA1",
            Algorithm::Sha256 => "SHA256",
            Algorithm::Sha512 => "SHA512",
        };
        let lines = self.0.iter();
        lines.map(|(file, (of, digest))| format!("{}({file})= {digest}\n", name(*of))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_is_the_same_after_it_was_written_and_read() {
        let mut digest = Digest::sha256();
        digest.update(b"abc");
        let hex = digest.hex();
        assert!(hex.starts_with("ba7816bf"), "{hex}");
        let mut manifest = Manifest::default();
        manifest.add("web.ovf", hex.clone());
        let again = Manifest::parse(&manifest.text()).unwrap();
        assert_eq!(again, manifest);
        let (mut digest, wanted) = again.check_of("web.ovf").unwrap();
        digest.update(b"abc");
        assert_eq!(digest.hex(), wanted);
        assert!(again.check_of("other").is_none());
        // As VirtualBox and ovftool write it.
        let old = Manifest::parse("SHA1 (a.ovf) = A9993E364706816ABA3E25717850C26C9CD0D89D\r\n");
        let old = old.unwrap();
        let (mut digest, wanted) = old.check_of("a.ovf").unwrap();
        digest.update(b"abc");
        assert_eq!(digest.hex(), wanted);
        assert!(Manifest::parse("MD5(a)= 00").is_err());
        assert!(Manifest::parse("nonsense").is_err());
    }
}
