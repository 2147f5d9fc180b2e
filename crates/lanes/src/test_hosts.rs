//! Hosts with certificates of one authority, for tests.

use godwit_pki::{Authority, Grant, Identity, Role};

/// Authority in a folder of its own, which is removed with the value.
pub(crate) struct TestAuthority {
    authority: Authority,
    _folder: tempfile::TempDir,
}

impl TestAuthority {
    pub(crate) fn new() -> TestAuthority {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(folder.path(), "test", 1).unwrap();
        TestAuthority { authority, _folder: folder }
    }

    pub(crate) fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Returns the identity of a host, valid for a day.
    pub(crate) fn host(&self, name: &str) -> Identity {
        let grant =
            Grant { name: name.to_owned(), role: Role::Host, addresses: Vec::new(), days: 1 };
        let issued = self.authority.issue(&grant).unwrap();
        Identity::load(&self.authority.certificate(), &issued.certificate, &issued.key).unwrap()
    }
}

/// Returns hosts a and b of one authority.
pub(crate) fn hosts() -> (TestAuthority, [Identity; 2]) {
    let authority = TestAuthority::new();
    let hosts = ["a", "b"].map(|name| authority.host(name));
    (authority, hosts)
}
